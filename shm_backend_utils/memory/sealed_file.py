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
    """A memfd (memfd_create(2)), to be used as any :class:`.SharedFile`, and checked as one.

    Honest clients seal its size. That is not checked: an allowed client could name a file without seals instead.
    """

    @classmethod
    def take(cls, key: str, received: Descriptor, field: str) -> SealedFile:
        """Open what was received once more, if it is such a file; what was received is closed then.

        A lock belongs to an open file description (fcntl(2)), and that of the received one is its sender's, too.

        What was received may be anything: nothing is asked of it that could block, before it is known to be a memfd. If
        this raises, it may still be open, and to close it may block. RegionRefusedError if it is no memfd, or may not
        be opened by this user; OSError if this process has no file descriptors left.
        """
        _check_is_memfd(received, field)
        file = cls(key, _reopened(received, field), field)
        received.close()
        return file

    def check_space(self, byte_size: int) -> None:
        """Raise RegionRefusedError unless it has memory for so many bytes, and they are whole pages of ordinary size.

        Where no huge page (``MFD_HUGETLB``) is free to fill a hole, the kernel ends the process that touches it.
        """
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
    # Without O_NONBLOCK, a lease of its client's would block this for lease-break-time, which is 45 s (fcntl(2)).
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return Descriptor(os.open, f"/proc/self/fd/{received.fileno()}", flags)
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        raise RegionRefusedError(
            field,
            f"the server cannot open it: {os.strerror(error.errno or 0)}; its client can let other users in by "
            "PoolOptions(access=...)",
        ) from None
