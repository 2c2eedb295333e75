"""The command as it is started, written from, and interrupted: one line and a status, or nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import shm_backend_utils
from shm_backend_utils import cli
from shm_backend_utils.cli.common import server
from shm_backend_utils.cli.terminal import ENDING, Interrupted, raise_on_signals, undisturbed
from shm_backend_utils.errors import MachineError

DISTRIBUTION = "triton-shm-backend-utils"


def test_a_module_of_pythons_is_the_command_and_tells_its_version() -> None:
    done = run(*REGIONS)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(*COMMAND, "--version")
    assert (done.returncode, done.stdout) == (0, f"{DISTRIBUTION} {shm_backend_utils.__version__}\n")
    assert metadata.version(DISTRIBUTION) == shm_backend_utils.__version__
    (found,) = [each for each in metadata.entry_points(group="console_scripts") if each.name == "shm-backend-utils"]
    assert found.value == "shm_backend_utils.cli:main"
    for arguments in ([], ["nonsense"]):
        done = run(*COMMAND, *arguments)
        assert done.returncode == 2
        assert "usage: shm-backend-utils [-h] [--version] COMMAND" in done.stderr


@pytest.mark.parametrize("others", [[], ["--help"], ["--once", "x"]], ids=str)
def test_a_command_that_is_gone_is_one_line_about_what_took_its_place(
    others: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.GONE, "old", "the new one")
    with pytest.raises(SystemExit) as caught:
        cli.main(["old", *others])
    told = "shm-backend-utils has no old any more: use the new one\n"
    assert (caught.value.code, *capsys.readouterr()) == (2, "", told)


COMMAND = [sys.executable, "-m", "shm_backend_utils"]
REGIONS = [*COMMAND, "regions"]


def run(*words: str, **named: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(words, **(pipes | named), text=True, check=False)


def test_a_full_disk_or_an_output_that_is_closed_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = run(*REGIONS, stdout=full)
    assert (done.returncode, done.stderr) == (1, "shm-backend-utils regions: [Errno 28] No space left on device\n")
    done = run("sh", "-c", 'exec "$@" >&-', "sh", *REGIONS)
    assert (done.returncode, done.stderr) == (1, "shm-backend-utils: standard output is closed\n")


def test_who_reads_no_further_is_told_nothing() -> None:
    with subprocess.Popen(REGIONS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_interrupt_while_modules_are_loaded_is_told_nothing_of(tmp_path: Path) -> None:
    (tmp_path / "tritonclient.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [*COMMAND, "doctor"]
    with subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (-signal.SIGINT, "")


def test_a_signal_while_output_waits_to_be_read_is_told_nothing_of() -> None:
    code = """if True:
        import sys
        from shm_backend_utils.cli import main, regions
        from shm_backend_utils.cli.terminal import raise_on_signals
        def run(_):
            raise_on_signals()
            sys.stdout.write("x" * 2**20)
            return 0
        regions.run = run
        sys.exit(main(["regions"]))
    """
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"  # the rest does not fit
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGTERM, b"")


@pytest.fixture
def _raising() -> Iterator[None]:
    """Have signals raise, as they do in a command."""
    before = {number: signal.getsignal(number) for number in ENDING}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_raising")
@pytest.mark.parametrize("number", ENDING)
def test_what_is_cleaned_up_is_cleaned_up_first(number: signal.Signals) -> None:
    done = []
    handlers = [signal.getsignal(each) for each in ENDING]

    def clean(interrupts: bool) -> None:
        with undisturbed():
            if interrupts:
                signal.raise_signal(number)
            done.append(number)

    with ThreadPoolExecutor(1) as another:  # which is never disturbed
        another.submit(clean, False).result()
    clean(False)
    assert [signal.getsignal(each) for each in ENDING] == handlers
    with pytest.raises(Interrupted) as caught:
        clean(True)
    assert (done, caught.value.number) == ([number] * 3, number)


@pytest.mark.usefixtures("_raising")
def test_what_has_a_server_for_a_while_removes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    really_remove = shutil.rmtree

    def remove(folder: Any, *given: Any, **named: Any) -> None:
        if not removed:
            signal.raise_signal(signal.SIGTERM)
        removed.append(str(folder))
        really_remove(folder, *given, **named)

    def fail(_: Path) -> Path:
        raise MachineError("there are no models")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(Interrupted), server.temporary_server("test", fail):
        pass
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == []
