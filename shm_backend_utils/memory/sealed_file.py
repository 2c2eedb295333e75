"""Another process's sealed memfd, open and not mapped. It has no name; its client has handed it over."""

from __future__ import annotations

import fcntl
import os

from ..errors import RegionRefusedError
from ..protocol.layout import PAGE_SIZE
from .descriptors import NO_DESCRIPTORS, Descriptor
from .shared_file import SharedFile

__all__ = ["SealedFile"]


class SealedFile(SharedFile):
    """A memfd, checked as any :class:`.SharedFile`; not for seals, as its client could hand over a file without any."""

    @classmethod
    def take(cls, key: str, received: Descriptor, field: str) -> SealedFile:
        """Open what was received once more, for locks of its own, and close it; RegionRefusedError if it is no memfd.

        It may be anything: nothing that could block is asked of it before it is known to be a memfd. If this raises, it
        may still be open.
        """
        _check_is_memfd(received, field)
        file = cls(key, _reopened(received, field), field)
        received.close()
        return file

    def check_space(self, byte_size: int) -> None:
        """Raise RegionRefusedError unless it has memory for these whole pages; huge ones may be missing."""
        page_size = os.fstatvfs(self._descriptor.fileno()).f_bsize
        if page_size > PAGE_SIZE:
            raise RegionRefusedError(self.field, f"its pages have {page_size} bytes; expected pages of {PAGE_SIZE}")
        if byte_size % PAGE_SIZE:
            raise RegionRefusedError(self.field, f"it claims {byte_size} bytes; expected whole pages of {PAGE_SIZE}")
        super().check_space(byte_size)


def _check_is_memfd(received: Descriptor, field: str) -> None:
    """Raise unless it is a memfd. Any other call may block: on a file of FUSE, fstat does."""
    try:
        fcntl.fcntl(received.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        raise RegionRefusedError(field, "what its client has handed over is no memfd; expected a sealed one") from None


def _reopened(received: Descriptor, field: str) -> Descriptor:
    try:
        return received.reopened()
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        raise RegionRefusedError(
            field,
            f"the server cannot open it: {os.strerror(error.errno or 0)}; its client can let other users in by "
            "PoolOptions(access=...)",
        ) from None
