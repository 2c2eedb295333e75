"""A progress bar with named steps. Standard library only: it runs before anything is installed."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Final

_BAR_WIDTH: Final = 24


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
