"""Ctrl+C at any line that some code comes to."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """KeyboardInterrupts at lines of some files, in the calling thread.

    Parameters
    ----------
    *places : pathlib.Path
        Files, and folders of files.
    """

    def __init__(self, *places: Path) -> None:
        self._files = tuple(f"{place}/" if place.is_dir() else f"{place}" for place in places)

    def at(self, number: int, work: Callable[[], object]) -> bool:
        """Do work that is interrupted at the n-th line that it comes to.

        Parameters
        ----------
        number : int
            From 1 on. A test tries one after another until the work comes to its end.
        work : callable
            Without arguments.

        Returns
        -------
        bool
            Whether the work raised KeyboardInterrupt. What swallows that, as a finalizer does, was not interrupted.
        """
        count = 0

        def look(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.startswith(self._files):
                return None
            if event == "line" and not _is_with(frame):
                count += 1
                if count == number:
                    raise KeyboardInterrupt
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def _is_with(frame: FrameType) -> bool:
    """Return whether the line is one of a `with`: no signal comes between its block and what ends it."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
