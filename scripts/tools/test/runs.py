"""Runs of pytest: what fails is run once more, alone. A test that passes then is a flake, which is a defect, too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, Final

from shm_backend_utils.server.install import FOLDER_VARIABLE

from .. import ROOT

__all__ = ["Environment", "Tally", "passed_to_pytest"]

_WORKERS: Final = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=20")
_MOST_RUN_AGAIN: Final = 20  # where more fail, it is no flake
_MOST_FLAKES: Final = 2
_FAILED: Final = 1  # as pytest says
_USAGE: Final = re.compile(r"ERROR: usage: .*|  (inifile|rootdir): .*|\s*")
_ENDS_S: Final = 60.0


@dataclass(frozen=True)
class Environment:
    """One of the checkout's environments.

    Attributes
    ----------
    name : str
        Of its folder.
    server : pathlib.Path, optional
        The folder of the server that tests run on; that of the environment's variables if not given.
    """

    name: str
    server: Path | None = None

    @property
    def command(self) -> list[str]:
        """The beginning of a command line that runs pytest there."""
        return [str(ROOT / self.name / "bin" / "python"), "-m", "pytest", "-o", f"cache_dir={self._cache}"]

    def failed(self) -> set[str]:
        """Return the tests that failed the last time they ran here."""
        found = ROOT / self._cache / "v" / "cache" / "lastfailed"
        return set(json.loads(found.read_text())) if found.exists() else set()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables to run pytest with."""
        return dict(os.environ) if self.server is None else os.environ | {FOLDER_VARIABLE: str(self.server)}

    @property
    def label(self) -> str:
        """The folder's name, and that of a server's folder."""
        return self.name if self.server is None else f"{self.name}, {self.server.name}"

    @property
    def _cache(self) -> str:
        return f".pytest_cache/{self.label}"


@dataclass
class Tally:
    """What came of all runs."""

    status: int = 0
    flakes: list[str] = field(default_factory=list)

    def run(self, environment: Environment, arguments: Sequence[str]) -> None:
        """Run tests, and those that failed once more, alone, if they are few.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C. All that was started has ended.
        """
        status = _run(environment, ["--cache-clear", *_WORKERS, *arguments])
        failed = environment.failed()
        if status == _FAILED and 0 < len(failed) <= _MOST_RUN_AGAIN:
            again = [each for each in arguments if each.startswith("-")]
            status = _run(environment, [*again, *sorted(failed)])
            self.flakes += [f"{environment.label}: {test}" for test in sorted(failed - environment.failed())]
        self.status = self.status or status  # which is negative where a signal has ended pytest

    def finish(self) -> int:
        """Name the flakes, and return the exit status."""
        if not self.flakes:
            return self.status
        print(f"=== {len(self.flakes)} flaky: failed, then passed; more than {_MOST_FLAKES} fail the run ===")
        print(*self.flakes, sep="\n")
        return self.status or int(len(self.flakes) > _MOST_FLAKES)


def passed_to_pytest(environment: Environment, arguments: list[str]) -> int:
    """Run pytest with a user's own arguments; return its status. One line tells of an option that it does not know."""
    process = subprocess.Popen(
        [*environment.command, *arguments], cwd=ROOT, env=environment.variables, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told = Thread(target=_tell, args=(process.stderr,))
    told.start()
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # which the terminal has sent to pytest, too
                return process.wait()
    except SystemExit:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        told.join()


def _tell(lines: IO[str]) -> None:
    for line in lines:
        if not _USAGE.fullmatch(line.rstrip("\n")):
            print(re.sub(r"^[\w. -]+: error: ", "scripts/test: ", line), end="", file=sys.stderr, flush=True)


def _run(environment: Environment, arguments: Sequence[str]) -> int:
    """Run pytest to its end, in a session of its own: what Ctrl-C at a terminal ends is told by us, in one line."""
    color = ["--color=yes"] if sys.stdout.isatty() else []
    process = subprocess.Popen(
        [*environment.command, *arguments, *color],
        cwd=ROOT,
        env=environment.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        while part := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest and its workers: as Ctrl-C does, and by force if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_ENDS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
