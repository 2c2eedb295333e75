"""The line of the user's code that began a call, or made an object that must be closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from pathlib import Path
from types import CodeType
from typing import Final, NamedTuple

__all__ = ["NOT_THE_USERS", "Origin"]

NOT_THE_USERS: Final = tuple(
    f"{Path(file).parent}/" for file in (__file__, asyncio.__file__, concurrent.futures.__file__)
)


class Origin(NamedTuple):
    """A line of the user's code; made at once, put into words when asked."""

    what: str  # the user's action there
    code: CodeType  # of the function, or module
    instruction: int  # its offset; to look up the line in a table takes long in a long function

    @property
    def line(self) -> int:
        """The number of the line in its file."""
        for begin, end, line in self.code.co_lines():
            if begin <= self.instruction < end and line is not None:
                return line
        return self.code.co_firstlineno

    @classmethod
    def here(cls, what: str) -> Origin:
        """Return the line that the calling thread is at, outside of this package."""
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
            frame = frame.f_back
        return cls(what, frame.f_code, frame.f_lasti)

    def __str__(self) -> str:
        return f"{self.what} at {self.code.co_filename}:{self.line}"
