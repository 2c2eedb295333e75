"""What ``scripts/setup`` makes anew, with which Python, what it extends and what it leaves alone; what it needs."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.tools import ROOT
from scripts.tools.setup import environment as environments
from scripts.tools.setup.environment import COMMANDS, EVERYTHING, Contents, Environment
from scripts.tools.setup.subprocesses import StepFailedError, ignore, run

setup = importlib.import_module("scripts.tools.setup.__main__")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, with a version and a list of dependencies."""
    checkout = tmp_path / "checkout"
    (checkout / "shm_backend_utils").mkdir(parents=True)
    (checkout / "shm_backend_utils" / "__init__.py").write_text('__version__: Final = "1"\n')
    (checkout / "pyproject.toml").write_text("dependencies\n")
    monkeypatch.setattr(environments, "ROOT", checkout)
    return checkout


class Recorded(Environment):
    """An environment whose making is only recorded."""

    def __init__(self, steps: list[str], failing: str = "") -> None:
        super().__init__(".venv")
        self._steps = steps
        self._failing = failing
        self.python = Path("/bin/false" if failing == "server" else "/bin/true")

    def create(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._steps.append("create")

    def install(self, contents: Contents, on_line: Callable[[str], None]) -> None:
        self._steps.append(contents.extras)
        if contents.extras == self._failing:
            raise StepFailedError("pip's words")


@pytest.fixture
def set_up(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What is done to an environment for some contents."""
    assert checkout.is_dir()
    monkeypatch.setattr(setup, "server_is_installed", lambda: True)

    def set_up(contents: Contents, failing: str = "") -> list[str]:
        steps: list[str] = []
        setup.set_up(Recorded(steps, failing), contents)
        return steps

    return set_up


def test_what_commands_need_comes_first_and_the_rest_is_added(set_up: Callable[..., list[str]]) -> None:
    assert set_up(COMMANDS) == ["create", "demo"]
    assert set_up(COMMANDS) == []
    assert set_up(EVERYTHING) == ["dev"]
    assert set_up(EVERYTHING) == []
    assert set_up(COMMANDS) == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "shm_backend_utils/__init__.py"])
def test_other_dependencies_make_it_anew(set_up: Callable[..., list[str]], checkout: Path, changed: str) -> None:
    set_up(EVERYTHING)
    (checkout / changed).write_text('__version__: Final = "2"\n')
    assert set_up(COMMANDS) == ["create", "demo"]


def test_what_failed_is_started_over(set_up: Callable[..., list[str]]) -> None:
    with pytest.raises(StepFailedError, match="pip's words"):
        set_up(COMMANDS, failing="demo")
    assert set_up(COMMANDS) == ["create", "demo"]


def test_a_server_that_cannot_be_installed_fails_the_setup_and_keeps_the_packages(
    set_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "server_is_installed", lambda: False)
    with pytest.raises(StepFailedError, match="/bin/false failed with status 1"):
        set_up(COMMANDS, failing="server")
    monkeypatch.setattr(setup, "server_is_installed", lambda: True)
    assert set_up(COMMANDS) == []


def test_an_environment_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(tmp_path: Path, checkout: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = elsewhere / "made-by-scripts-setup"
    kept.write_text("another checkout's")
    (checkout / ".venv").symlink_to(elsewhere)

    with pytest.raises(StepFailedError) as refusal:
        Environment(".venv").create()

    assert kept.read_text() == "another checkout's"
    assert str(refusal.value) == (
        f"{checkout}/.venv is a link to {elsewhere}, and making it anew would empty that folder: remove the link first"
    )


def test_neither_the_setup_nor_the_servers_installation_needs_a_package() -> None:
    """Who has a bare Python has no NumPy, and the server comes before it."""
    modules = [
        "scripts.tools.setup.__main__",
        "shm_backend_utils.server.install",
        "shm_backend_utils.server.stub_numpy",
    ]
    program = (
        f"import importlib, sys; [importlib.import_module(each) for each in {modules}]; print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_command_that_fails_is_told_in_its_own_words_and_its_lines_are_passed_on() -> None:
    lines: list[str] = []
    with pytest.raises(StepFailedError, match=r"^its words$"):
        run(["sh", "-c", "echo one; echo two; echo its words >&2; exit 3"], lines.append)
    assert lines == ["one\n", "two\n"]
    with pytest.raises(StepFailedError, match="^false failed with status 1$"):
        run(["false"], ignore)


# A version manager's: it is there for every version, and works where that is enabled.
SHIM = """#!/bin/sh
[ "$PYENV_VERSION" = 3.12 ] || exit 127
echo /versions/3.12/bin/python3.12
"""


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only Python on the PATH."""
    (tmp_path / "python3.12").write_text(SHIM)
    (tmp_path / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    monkeypatch.delenv("PYENV_VERSION", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 9))


@pytest.mark.usefixtures("shim")
@pytest.mark.parametrize("wanted", ["3.12", None])
def test_a_python_of_a_version_manager_is_found(wanted: str | None) -> None:
    found = runpy.run_path(str(ROOT / "scripts" / "setup"))["find_python"](12, wanted)
    assert found == "/versions/3.12/bin/python3.12"


@pytest.mark.usefixtures("shim")
def test_a_python_that_is_not_there_is_said_to_be_needed() -> None:
    with pytest.raises(SystemExit, match=r"scripts/setup needs Python 3\.13; this is Python 3\.9, and no other one"):
        runpy.run_path(str(ROOT / "scripts" / "setup"))["find_python"](13, "3.13")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--python", "3.9"], "Python 3.9; expected one of 3.13, 3.12, 3.11, 3.10"),
        (["--numpy1", "--python=3.13"], "Python 3.13; expected one of 3.12, 3.11, 3.10"),
    ],
)
def test_a_python_that_there_is_nothing_for_is_refused(options: list[str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "setup", *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"scripts/setup makes no such environment with {expected}\n")


def test_a_version_of_no_server_is_refused() -> None:
    wanted = {**os.environ, "SHM_BACKEND_UTILS_SERVER_VERSION": "9.9"}
    done = subprocess.run([ROOT / "scripts" / "setup"], env=wanted, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("scripts/setup failed:\nthere is no server '9.9' to install; expected ")


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ([], ".venv"),
        (["--numpy1"], ".venv-numpy1"),
        (["--python", "3.12"], ".venv-py3.12"),
        (["--python=3.12", "--numpy1"], ".venv-py3.12-numpy1"),
    ],
)
def test_environments_differ(options: list[str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Environment] = []
    for module in (setup, environments):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "set_up", lambda environment, contents: made.append(environment))
    monkeypatch.setattr(sys, "argv", ["setup", *options])
    assert setup.main() == 0
    assert [environment.folder for environment in made] == [tmp_path / folder]
