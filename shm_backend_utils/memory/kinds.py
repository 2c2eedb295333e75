"""What managed regions can be made of."""

from __future__ import annotations

import enum
from typing import Final

from ..protocol.layout import PAGE_SIZE

__all__ = ["HUGE_PAGE_SIZE", "RegionKind"]

HUGE_PAGE_SIZE: Final = 2**21
"""Bytes of the huge pages that are asked for: those of x86-64 and, with pages of 4 KiB, of ARM64."""


class RegionKind(enum.Enum):
    """What a managed region is made of."""

    SYSTEM = "system"
    """POSIX shared memory: an object in ``/dev/shm``."""

    SEALED = "sealed"
    """A memfd whose size is sealed, handed over by a socket."""

    HUGE = "sealed, of huge pages"
    """The same, of huge pages."""

    def whole_pages(self, byte_size: int) -> int:
        """Return the least size of so many bytes at least that memory of this kind can have."""
        page_size = HUGE_PAGE_SIZE if self is RegionKind.HUGE else PAGE_SIZE
        return -(-byte_size // page_size) * page_size
