"""A sealed memfd of somebody else, open and not mapped. It has no name; its client has handed it over."""

from __future__ import annotations

import fcntl
import os
from typing import Final

from ..errors import RegionRefusedError
from ..protocol.layout import PAGE_SIZE
from .descriptors import NO_DESCRIPTORS, Descriptor
from .shared_file import SharedFile

__all__ = ["SealedFile"]

_F_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl(2); the fcntl module has no name for it before Python 3.13

_NEEDED: Final = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}
_FORBIDDEN: Final = {"F_SEAL_WRITE": fcntl.F_SEAL_WRITE, "F_SEAL_FUTURE_WRITE": _F_SEAL_FUTURE_WRITE}


class SealedFile(SharedFile):
    """A memfd (memfd_create(2)) whose size nobody can change any more, and to which one can write.

    To be used as any :class:`.SharedFile`, and checked as one: that it is sealed says nothing of whose it is, how large
    it is and what memory it has. Its holes can still be punched.
    """

    @classmethod
    def take(cls, key: str, received: Descriptor, field: str) -> SealedFile:
        """Open what was received once more, if it is such a file; what was received is closed then.

        A lock belongs to an open file description (fcntl(2)), and that of the received one is its sender's, too.

        Parameters
        ----------
        key : str
            What names it in a request.
        received : Descriptor
            May be anything. Nothing is asked of it that could block, before it is known to be a memfd. If this raises,
            it may still be open, and to close it may block.
        field : str
            What to call it in messages.

        Raises
        ------
        RegionRefusedError
            It is no memfd, is sealed otherwise, or may not be opened by this user.
        OSError
            This process has no file descriptors left.
        """
        _check_seals(received, field)
        status = os.fstat(received.fileno())
        file = cls(key, _reopened(received, field), field)
        if not os.path.samestat(file.status, status):
            file.close()
            raise RegionRefusedError(field, "it became another object while the server opened it")
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


def _check_seals(received: Descriptor, field: str) -> None:
    """Raise unless it is a memfd with the right seals. Any other call may block: on a file of FUSE, fstat does."""
    try:
        seals = fcntl.fcntl(received.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        raise RegionRefusedError(field, "what its client has handed over is no memfd; expected a sealed one") from None
    missing = [name for name, seal in _NEEDED.items() if not seals & seal]
    if missing:
        raise RegionRefusedError(
            field, f"its client has handed over a file without {', '.join(missing)}; expected {', '.join(_NEEDED)}"
        )
    forbidden = [name for name, seal in _FORBIDDEN.items() if seals & seal]
    if forbidden:
        raise RegionRefusedError(
            field, f"it has {', '.join(forbidden)}, and the model writes its outputs there; leave that seal away"
        )


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
