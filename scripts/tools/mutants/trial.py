"""One mutant's trial: the tests that may execute it, in a forked process that imports the library with its change."""

from __future__ import annotations

import importlib.machinery
import os
import select
import shutil
import signal
import sys
import time
import traceback
import types
from enum import Enum
from pathlib import Path
from typing import Final

import hypothesis  # noqa: F401  # what every test needs is imported once, before the processes are forked
import numpy as np  # noqa: F401
import pytest

from shm_backend_utils.memory.shared_file import DEV_SHM

from .. import ROOT
from .checks import Mutant, mutate
from .covering import pytest_options

__all__ = ["Verdict", "try_mutant"]

_HANGS_AFTER_S: Final = 20  # of one test


class Verdict(Enum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_EXECUTED = "not executed"


def try_mutant(mutant: Mutant, tests: list[str], limit_s: float, folder: Path) -> Verdict:
    if not tests:
        return Verdict.NOT_EXECUTED
    before = set(DEV_SHM.iterdir())
    pid = os.fork()
    if pid == 0:
        _run(mutant, tests, folder)
    watch = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([watch], [], [], limit_s)
    finally:
        os.close(watch)
        _kill_all_of(pid)
        _, status = os.waitpid(pid, 0)
        for path in set(DEV_SHM.iterdir()) - before:  # /dev/shm is this tool's own
            _remove(path)
    if not ended:
        return Verdict.TIMED_OUT
    return Verdict.SURVIVED if status == 0 else Verdict.KILLED


def _kill_all_of(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or not made its group yet
            time.sleep(0.001)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
        else:
            return


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(mutant: Mutant, tests: list[str], folder: Path) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with (folder / "output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "examples")
        os.chdir(ROOT)
        _import_changed(mutant)
        options = [
            *pytest_options(folder),
            "-x",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            f"--timeout={_HANGS_AFTER_S}",
        ]
        status = pytest.main([*options, *tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import_changed(mutant: Mutant) -> None:
    """Have Python's imports take a changed module for the real one, whatever is cached of that, and imported."""
    path = ROOT / mutant.file
    code = compile(mutate(mutant, path.read_text()), str(path), "exec")
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def changed(self: importlib.machinery.SourceFileLoader, fullname: str) -> types.CodeType | None:
        return code if Path(self.path) == path else get_code(self, fullname)

    setattr(loader, "get_code", changed)  # noqa: B010  # mypy takes no assignment to a method
    for name in [name for name in sys.modules if name.partition(".")[0] == "shm_backend_utils"]:
        del sys.modules[name]  # this tool uses some itself
