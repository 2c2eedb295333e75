"""Leases: kernel locks on bytes of a region that show live owners and used slots.

An OFD lock (fcntl(2), ``F_OFD_SETLK``) belongs to an open file description. The kernel releases it when the last
descriptor is closed, and so when its process ends in any way: a crash needs no cleanup. The bytes:

=====================================  =============================================================
byte                                   held by
=====================================  =============================================================
0                                      the region's owner, for as long as it lives
1                                      shared, by all processes that map device memory that a slot here fences
2                                      a reaper, while it removes the region
first byte of a slot's record          the model, while it executes a request in that slot
the next byte                          shared, by every model to which that model has lent the slot's memory
the byte after that                    shared, by every model that has answered while its GPU still works in the slot
the first two of them                  the client, while it takes back a slot that it gave up
=====================================  =============================================================

Only the owner takes byte 0, before any other process can find the region. So if that byte is free, the owner is dead
or done, for ever. The owner of a sealed region, which has no name, removes the region by releasing this lock.

Locks on one description do not exclude each other. So the threads of one process share a :class:`SlotLease` for each
slot, which adds a lock of its own; other processes have other descriptions.

:mod:`shm_backend_utils.protocol.layout` says where a slot's record begins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from typing import Final

from ..errors import StaleRequestError
from .descriptors import Descriptor, translate_os_errors

__all__ = [
    "OWNERS_LEASE",
    "UNLOCKED",
    "SharedLease",
    "SlotLease",
    "borrow",
    "exclude_reapers",
    "has_borrowers",
    "has_users",
    "hold_owner_lease",
    "is_owner_alive",
    "is_slot_in_use",
    "let_go_of_owner_lease",
    "use",
    "work",
]

_OWNER_BYTE: Final = 0
_USERS_BYTE: Final = 1
_REAPER_BYTE: Final = 2
_BORROWED: Final = 1  # the distance from the byte of a slot's lease
_WORKING: Final = 2
_LEASE: Final = "a lease on memory that another process frees"
_BUSY: Final = frozenset({errno.EACCES, errno.EAGAIN})
# struct flock: type, whence, start, length, pid. The pid of an OFD lock must be 0.
_FLOCK: Final = struct.Struct("hhqqi4x")


def _flock(kind: int, byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, 0, byte, length, 0)


OWNERS_LEASE: Final = _flock(fcntl.F_WRLCK, _OWNER_BYTE)
"""The owner's lease, as an argument of ``F_OFD_GETLK``."""
UNLOCKED: Final = _flock(fcntl.F_UNLCK, _OWNER_BYTE)[:2]
"""The beginning of the kernel's answer for a free lock."""


def hold_owner_lease(fd: int) -> None:
    """Take the owner's lease of a region that no other process knows yet, until the descriptor is closed."""
    if not _try_lock(fd, _flock(fcntl.F_WRLCK, _OWNER_BYTE)):
        raise AssertionError("another process holds the lease of a region that has no name yet")


def let_go_of_owner_lease(fd: int) -> None:
    """Release the owner's lease for good: other processes then know that the region is removed."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _OWNER_BYTE))


def exclude_reapers(fd: int) -> bool:
    """Keep other reapers away from a region until the descriptor is closed. Return False if one is at work."""
    return _try_lock(fd, _flock(fcntl.F_WRLCK, _REAPER_BYTE))


def is_owner_alive(fd: int) -> bool:
    """Return whether some description other than this one holds the owner's lease. Takes no lock."""
    return not fcntl.fcntl(fd, fcntl.F_OFD_GETLK, OWNERS_LEASE).startswith(UNLOCKED)


def is_slot_in_use(fd: int, record: int) -> bool:
    """Return whether another description holds the lease of a slot, has borrowed the slot, or has a GPU at work there.

    ``record`` is where the slot's record begins.
    """
    return _is_locked(fd, record, 1 + _WORKING)


def has_borrowers(fd: int, record: int) -> bool:
    """Return whether another description holds the lock of :func:`borrow`. Takes no lock."""
    return _is_locked(fd, record + _BORROWED)


def has_users(fd: int) -> bool:
    """Return whether another description holds the lock of :func:`use`. Takes no lock."""
    return _is_locked(fd, _USERS_BYTE)


def use(fd: int) -> SharedLease:
    """Show the owner of device memory that this process maps it, so that the owner does not free it yet."""
    return _shared(fd, _USERS_BYTE)


def borrow(fd: int, record: int) -> SharedLease | None:
    """Show the client that this process also uses a slot's memory; None if the client is just taking it back."""
    return SharedLease.take(fd, record + _BORROWED)


def work(fd: int, record: int) -> SharedLease:
    """Show the client that this process lives, and that its GPU still works in a slot whose request is answered."""
    return _shared(fd, record + _WORKING)


def _shared(fd: int, byte: int) -> SharedLease:
    lease = SharedLease.take(fd, byte)
    if lease is None:  # its client breaks the protocol
        raise StaleRequestError("another process has locked this memory exclusively, which only its client can do")
    return lease


class SharedLease:
    """A shared lock on one byte, through a description of its own.

    The lock outlives this object: if CUDA fails to unmap memory, the owner must not free that memory.
    """

    __slots__ = ("_own",)

    def __init__(self, own: Descriptor) -> None:
        self._own = own

    @classmethod
    @translate_os_errors(f"{_LEASE} takes a file descriptor", f"{_LEASE} cannot be taken: {{}}")
    def take(cls, fd: int, byte: int) -> SharedLease | None:
        """Take the lease; None if another description locks the byte exclusively. MachineError if the system fails."""
        own = Descriptor(os.open, f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        if not _try_lock(own.fileno(), _flock(fcntl.F_RDLCK, byte)):
            own.close()
            return None
        own.outlive_object()  # only now: a lease lost to an interrupt before this protects nothing
        return cls(own)

    def give_back(self) -> None:
        """Give the lease back. Twice is fine."""
        self._own.close()


class SlotLease:
    """The lease of one slot, through a descriptor that it does not own. One object per slot and process."""

    __slots__ = ("_fd", "_in_process", "_lock", "_lock_both", "_unlock")

    def __init__(self, fd: int, record: int) -> None:
        self._fd = fd
        self._lock = _flock(fcntl.F_WRLCK, record)
        self._lock_both = _flock(fcntl.F_WRLCK, record, 1 + _BORROWED)
        self._unlock = _flock(fcntl.F_UNLCK, record, 1 + _BORROWED)
        self._in_process = threading.Lock()

    def take(self) -> bool:
        """Take the lease if no other thread or process has it. Never waits. Return whether it was taken."""
        if not self._in_process.acquire(False):
            return False
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._lock)
        except BaseException as error:
            self._in_process.release()
            if isinstance(error, OSError) and error.errno in _BUSY:
                return False
            raise
        return True

    def take_back(self) -> bool:
        """Take the lease for the client, like :meth:`take`, but only if no model has borrowed the memory either."""
        if not self._in_process.acquire(False):
            return False
        try:
            taken = _try_lock(self._fd, self._lock_both)
        except BaseException:
            self._in_process.release()
            raise
        if not taken:
            self._in_process.release()
        return taken

    @property
    def is_taken_here(self) -> bool:
        """Whether a thread of this process holds the lease."""
        return self._in_process.locked()

    def give_back(self) -> None:
        """Give the lease back. Only its holder may."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._unlock)
        finally:
            self._in_process.release()


def _is_locked(fd: int, byte: int, length: int = 1) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, length))
    (kind, *_) = _FLOCK.unpack(answer)
    return bool(kind != fcntl.F_UNLCK)


def _try_lock(fd: int, lock: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True
