"""Programs that run one after another or side by side, and a progress bar with named steps. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

__all__ = ["StepFailedError", "Subprocess", "ignore", "run"]

_BAR_WIDTH: Final = 24


class StepFailedError(Exception):
    """A step of the setup failed; the message is what the command that failed had to say."""


class Subprocess:
    """A program that runs. A context manager, which ends it: the next run makes anew what it changes."""

    def __init__(self, words: list[str]) -> None:
        self._name = words[0]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def finish(self, on_line: Callable[[str], None]) -> None:
        """Pass on each line of its output until it ends.

        Raises StepFailedError: it failed; the message is what it wrote to standard error.
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


class Progress:
    """Shows on standard error which step is running: on a terminal one line, drawn over and over; else one per step."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps
        self._index = -1
        self._lines_of_step = 0
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()

    def begin(self, step: str) -> None:
        """Begin the next step."""
        self._index += 1
        self._lines_of_step = 0
        if self._is_terminal:
            self._draw(step)
        else:
            print(f"[{self._index + 1}/{len(self._steps)}] {step}", file=sys.stderr, flush=True)

    def advance_by_pip_line(self, line: str) -> None:
        """Show a line of pip's output as part of the running step."""
        words = line.split()
        if self._is_terminal and words and words[0] in ("Collecting", "Downloading", "Using", "Building", "Installing"):
            self._lines_of_step += 1
            self._draw(f"{self._steps[self._index]}: {' '.join(words)}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            if error is None:
                self._index += 1
                self._lines_of_step = 0
                self._draw(f"done in {time.monotonic() - self._started:.0f} s")
            print(file=sys.stderr)

    def _draw(self, text: str) -> None:
        # pip does not say how many lines there will be, so the bar nears the end of its step and never passes it.
        done = (self._index + self._lines_of_step / (self._lines_of_step + 40)) / len(self._steps)
        filled = round(_BAR_WIDTH * done)
        bar = "━" * filled + "╌" * (_BAR_WIDTH - filled)
        line = f"{bar} {done:4.0%}  {text}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
