"""A page that a client of the soak shares with the soak: what it is doing. It outlives a client that is killed."""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Final

__all__ = ["Board", "Phase"]

_PHASE: Final = 0
_VERIFIED: Final = 1


class Phase(IntEnum):
    """What a client is doing."""

    ELSEWHERE = 0
    WRITING = 1
    IN_FLIGHT = 2
    READING = 3
    STREAMING = 4


class Board:
    """The page, on either side.

    Attributes
    ----------
    fd : int
        Owned; a client inherits it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def create(cls) -> Board:
        """Make a page."""
        fd = os.memfd_create("soak")
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    @property
    def phase(self) -> Phase:
        """What the client is doing."""
        return Phase(self._words[_PHASE])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[_PHASE] = phase

    @property
    def verified(self) -> int:
        """How many right results the client has seen."""
        return self._words[_VERIFIED]

    @verified.setter
    def verified(self, count: int) -> None:
        self._words[_VERIFIED] = count

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
