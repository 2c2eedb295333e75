"""A mapping of memory that processes share, whatever kind it is of: its descriptor, its pages, its end."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import ClosedError, RegionRefusedError
from ..process import call_after_fork
from .descriptors import NO_DESCRIPTORS, Descriptor, translate_os_errors
from .shared_file import BLOCK_SIZE, SharedFile, allocate

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MappedSegment"]

_MADV_POPULATE_WRITE: Final = 23  # madvise(2); the mmap module has no name for it
_PREFAULT_PIECE: Final = 4 * 2**20  # about a millisecond


class MappedSegment(ABC):
    """Shared memory, mapped as a whole until the last array over it is gone, and open until :meth:`close`."""

    _room: Callable[[], float]  # how many bytes there are for memory like this

    def __init__(self, key: str, descriptor: Descriptor, byte_size: int) -> None:
        """Map ``byte_size`` bytes of what is open, and close that."""
        self.key = key  # its name in requests
        self.byte_size = byte_size
        self._descriptor = descriptor  # until it is mapped
        self._maker = 0  # the process that has made the memory; 0 if it was another one
        self._map: mmap.mmap | None = None
        call_after_fork(self)
        try:
            status = os.fstat(descriptor.fileno())
            # What the mapping *is*, where the key is only what it was called.
            self.identity = (status.st_dev, status.st_ino)
            # Bytes that had memory when it was mapped, and no holes.
            self.space = min(byte_size, status.st_blocks * BLOCK_SIZE)
            self._map = mmap.mmap(descriptor.fileno(), byte_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # The mapping has a descriptor of its own, which a forked child cannot close while an array lives. So locks
            # belong to another open file description.
            self._descriptor = descriptor.reopened()
        finally:
            descriptor.close()  # here, as an error may keep it for long

    @classmethod
    def _make(cls, key: str, descriptor: Descriptor, byte_size: int, prepare: Callable[[MappedSegment], None]) -> Self:
        """Map memory that this process has made, and prepare it. No other process can find it yet."""
        segment = cls(key, descriptor, byte_size)
        segment._maker = os.getpid()
        try:
            prepare(segment)
        except BaseException:
            segment.close()  # here, as an error may keep it for long
            raise
        return segment

    @classmethod
    @translate_os_errors()
    def map(cls, file: SharedFile, byte_size: int) -> Self:
        """Map the first bytes of another process's file that was checked, and take the file's descriptor."""
        try:
            return cls(file.key, file.detach(), byte_size)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            reason = f"the server cannot map its {byte_size} bytes: {os.strerror(error.errno or 0)}"
            raise RegionRefusedError(file.field, reason) from None

    def grow(self, byte_size: int, deadline: float = math.inf) -> None:
        """Take space for more bytes and map them anew; OSError, or TimeoutError, if that cannot be in time."""
        with contextlib.closing(self._descriptor.reopened()) as descriptor:  # stays open if this is closed
            fd = descriptor.fileno()
            try:
                allocate(fd, 0, byte_size, self._room(), deadline)
                grown = mmap.mmap(fd, byte_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except BaseException:
                size = min(byte_size, os.fstat(fd).st_size)
                if size > self.byte_size:
                    mmap.mmap(fd, size).madvise(mmap.MADV_REMOVE, self.byte_size)
                raise
        self._map = grown
        self.byte_size = self.space = byte_size

    @abstractmethod
    def check(self, byte_size: int, field: str) -> None:
        """Raise unless its owner still offers it, with as many bytes as claimed and as much memory as it had."""

    @property
    @abstractmethod
    def is_unlinked(self) -> bool:
        """Whether it can no longer be opened, as its owner has removed it, or it was closed here."""

    @abstractmethod
    def unlink(self) -> None:
        """Keep others from opening it, unless this is a forked child. Mappings of it stay valid. Twice is fine."""

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._map is None

    def fileno(self) -> int:
        """Return the open descriptor, which the segment owns; raises ClosedError once it is closed."""
        if self._map is None:
            raise ClosedError("this shared-memory segment")
        return self._descriptor.fileno()

    def prefault(self, deadline: float = math.inf) -> None:
        """Enter every page into this process' page tables, until a moment; a kernel before 5.14 does nothing.

        Piece by piece, as the interpreter's other threads and signals wait meanwhile.
        """
        mapped = self._map
        if mapped is not None:
            with contextlib.suppress(OSError):
                for begin in range(0, self.byte_size, _PREFAULT_PIECE):
                    if time.monotonic() > deadline:
                        return
                    mapped.madvise(_MADV_POPULATE_WRITE, begin, min(_PREFAULT_PIECE, self.byte_size - begin))

    def buffer(self) -> memoryview:
        """Return the whole mapping, writable. The view, and everything made from it, keeps the mapping alive."""
        if self._map is None:
            raise ClosedError("this shared-memory segment")
        return memoryview(self._map)

    def __del__(self) -> None:
        """Remove this process's object that was lost by an interrupt, before it could be kept or closed."""
        if getattr(self, "_map", None) is not None:
            if self._maker:
                self.unlink()
            self.close()

    def after_fork(self) -> None:
        """Let go of the memory in a forked child; it stays mapped while arrays over it live."""
        self.close()

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while arrays over it live. Closing twice is fine."""
        self._map = None
        self._descriptor.close()
