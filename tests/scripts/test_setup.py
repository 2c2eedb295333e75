"""What ``scripts/setup`` makes anew, with which Python, what it extends and what it leaves alone; what it needs."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.tools import ROOT
from scripts.tools.processes import children, command_line
from scripts.tools.setup.__main__ import COMMANDS, EVERYTHING, Contents, Environment, StepFailedError, beside

setup = importlib.import_module("scripts.tools.setup.__main__")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, with a version and a list of dependencies."""
    checkout = tmp_path / "checkout"
    (checkout / "shm_backend_utils").mkdir(parents=True)
    (checkout / "shm_backend_utils" / "__init__.py").write_text('__version__: Final = "1"\n')
    (checkout / "pyproject.toml").write_text("dependencies\n")
    monkeypatch.setattr(setup, "ROOT", checkout)
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

    def install(self, contents: Contents) -> None:
        self._steps.append(contents.extras)
        if contents.extras == self._failing:
            raise StepFailedError("pip's words")


@pytest.fixture
def set_up(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What is done to an environment for some contents."""
    monkeypatch.setattr(setup, "server_is_installed", lambda: True)

    def set_up(contents: Contents, failing: str = "") -> list[str]:
        steps: list[str] = []
        setup.set_up(Recorded(steps, failing), contents)
        return steps

    return set_up


def test_what_commands_need_comes_first_and_the_rest_is_added(set_up: Callable[..., list[str]]) -> None:
    with pytest.raises(StepFailedError, match="pip's words"):
        set_up(COMMANDS, failing="demo")
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


def test_what_a_step_has_started_ends_with_it() -> None:
    words = ["env", "--default-signal=INT", "sh", "-c", "sleep 10000; :"]
    with contextlib.suppress(KeyboardInterrupt), beside(words) as step:
        while not (begun := children(step.pid)):
            time.sleep(0.01)
        raise KeyboardInterrupt
    while any(map(command_line, begun)):
        time.sleep(0.01)


def test_an_environment_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(checkout: Path) -> None:
    elsewhere = checkout / "shm_backend_utils"
    kept = sorted(elsewhere.iterdir())
    (checkout / ".venv").symlink_to(elsewhere)
    with pytest.raises(
        StepFailedError, match=f"^{checkout}/.venv is a link to {elsewhere}, .*: remove the link first$"
    ):
        Environment(".venv").create()
    assert sorted(elsewhere.iterdir()) == kept


def test_neither_the_setup_nor_the_servers_installation_needs_a_package() -> None:
    """Who has a bare Python has no NumPy, and the server comes before it."""
    imports = "import scripts.tools.setup.__main__, shm_backend_utils.server.install, sys"
    program = f"{imports}; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


# A version manager's: it is there for every version, and works where that is enabled.
SHIM = """#!/bin/sh
[ "$PYENV_VERSION" = 3.12 ] || exit 127
echo /versions/3.12/bin/python3.12
"""


@pytest.mark.parametrize("wanted", ["3.12", None])
def test_a_python_of_a_version_manager_is_found(
    wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3.12").write_text(SHIM)
    (tmp_path / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    monkeypatch.delenv("PYENV_VERSION", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 9))
    found = runpy.run_path(str(ROOT / "scripts" / "setup"))["find_python"](12, wanted)
    assert found == "/versions/3.12/bin/python3.12"
