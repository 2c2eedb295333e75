"""The command, as it is started: by its name, or as a module of Python's."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import shm_backend_utils
from shm_backend_utils import cli

DISTRIBUTION = "triton-shm-backend-utils"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shm_backend_utils", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_module_of_pythons_is_the_command() -> None:
    done = run("regions")
    assert (done.returncode, done.stderr) == (0, "")


def test_it_tells_its_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"{DISTRIBUTION} {shm_backend_utils.__version__}\n")
    assert metadata.version(DISTRIBUTION) == shm_backend_utils.__version__


def test_a_copy_that_was_not_installed_tells_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"{DISTRIBUTION} {shm_backend_utils.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_what_is_no_command_is_told_how_to_ask(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: shm-backend-utils [-h] [--version] COMMAND" in done.stderr


@pytest.mark.parametrize("others", [[], ["--help"], ["--once", "x"]], ids=str)
def test_a_command_that_is_gone_is_one_line_about_what_took_its_place(
    others: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.GONE, "old", "the new one")
    with pytest.raises(SystemExit) as caught:
        cli.main(["old", *others])
    assert (caught.value.code, *capsys.readouterr()) == (
        2,
        "",
        "shm-backend-utils has no old any more: use the new one\n",
    )


def test_no_command_is_gone_and_there() -> None:
    assert not {command.name for command in cli.COMMANDS} & set(cli.GONE)


def test_the_command_has_its_name() -> None:
    (found,) = [each for each in metadata.entry_points(group="console_scripts") if each.name == "shm-backend-utils"]
    assert found.value == "shm_backend_utils.cli:main"
