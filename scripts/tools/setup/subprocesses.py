"""Run programs, one after another or side by side, with what they had to say as the error. Standard library only."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from types import TracebackType

__all__ = ["StepFailedError", "Subprocess", "ignore", "run"]


class StepFailedError(Exception):
    """A step of the setup failed; the message is what the command that failed had to say."""


class Subprocess:
    """A program that runs. A context manager, which ends it: it must not go on changing what the next run makes anew.

    Parameters
    ----------
    words : list of str
        The command line.
    """

    def __init__(self, words: list[str]) -> None:
        self._name = words[0]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def finish(self, on_line: Callable[[str], None]) -> None:
        """Pass on each line of its output until it ends.

        Raises
        ------
        StepFailedError
            It failed; the message is what it wrote to standard error.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_line(line)
        if self._process.wait() != 0:
            self._errors.seek(0)
            told = self._errors.read().strip()
            raise StepFailedError(told or f"{self._name} failed with status {self._process.returncode}")

    def __enter__(self) -> Subprocess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def run(words: list[str], on_line: Callable[[str], None]) -> None:
    """Run a command to its end; see :meth:`Subprocess.finish`."""
    with Subprocess(words) as process:
        process.finish(on_line)


def ignore(line: str) -> None:
    """Do nothing with a line."""
