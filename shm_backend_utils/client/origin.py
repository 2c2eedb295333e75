"""Which line of the user's code began a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from pathlib import Path
from typing import Final

__all__ = ["Origin"]

_NOT_THE_USERS: Final = tuple(
    f"{Path(file).parent}/" for file in (__file__, asyncio.__file__, concurrent.futures.__file__)
)


class Origin:
    """The line that the calling thread is at, outside of this package; made at once, put into words when asked.

    Parameters
    ----------
    what : str
        What it does there.
    depth : int
        How many callers are known to be of this package.
    """

    __slots__ = ("_file", "_line", "_what")

    def __init__(self, what: str, depth: int = 1) -> None:
        try:
            frame = sys._getframe(depth)
        except ValueError:  # no line of Python has made the call: a thread or a greenlet began with it
            frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        self._what = what
        self._file = frame.f_code.co_filename
        self._line = frame.f_lineno

    def __str__(self) -> str:
        return f"{self._what} at {self._file}:{self._line}"
