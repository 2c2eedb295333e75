"""Segments: memory that processes share, mapped as a whole.

POSIX shared memory is a file in ``/dev/shm``: shm_open(3) is open(2) there (shm_overview(7)). Sealed memory is a memfd
(memfd_create(2)), which has no name, cannot be truncated, and ends with its last process. Processes fetch it from its
maker over a socket (:mod:`.handover`), so they only need to share a network namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import ClosedError, NoSharedMemoryError, RegionGoneError, RegionRefusedError
from ..process import call_after_fork
from . import locks
from .descriptors import NO_DESCRIPTORS, PRIVATE, Access, Descriptor, translate_os_errors
from .handover.server import REGISTRY
from .machine import MORE_MEMORY, available_bytes, memory_bytes
from .shared_file import BLOCK_SIZE, DEV_SHM, MORE_ROOM, NO_SPACE, SharedFile, allocate, free_bytes, total_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SEALED_LINK", "MappedSegment", "SealedSegment", "SystemSegment"]

_MADV_POPULATE_WRITE: Final = 23  # madvise(2); the mmap module has no name for it
_PREFAULT_PIECE: Final = 4 * 2**20  # about a millisecond
_MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; the os module has no name for it
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MOST_BYTES: Final = 2**40  # the most that sealed memory can grow to; unallocated bytes take no memory
_NAME: Final = "shmbu"

SEALED_LINK: Final = f"/memfd:{_NAME} (deleted)"
"""The name of sealed memory in ``/proc/PID/fd`` and ``/proc/PID/maps``."""


class MappedSegment(ABC):
    """Shared memory, mapped as a whole until the last array over it is gone, and open until :meth:`close`."""

    _room: Callable[[], float]  # how many bytes are free for this kind of memory
    _lack_of_room: Callable[[int], str]  # the message if they are too few

    def __init__(self, key: str, descriptor: Descriptor, byte_size: int) -> None:
        """Map ``byte_size`` bytes of an open descriptor, and close the descriptor."""
        self.key = key  # the segment's name in requests
        self.byte_size = byte_size
        self._descriptor = descriptor  # replaced once the memory is mapped
        self._maker = 0  # the id of the process that made the memory, this one or a parent; else 0
        self._map: mmap.mmap | None = None
        call_after_fork(self)
        try:
            status = os.fstat(descriptor.fileno())
            # Identifies the mapped object; its key may name another object by now.
            self.identity = (status.st_dev, status.st_ino)
            # The bytes that had memory, and were no holes, at the moment of mapping.
            self.space = min(byte_size, status.st_blocks * BLOCK_SIZE)
            self._map = mmap.mmap(descriptor.fileno(), byte_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # The mapping has a descriptor of its own, which a forked child cannot close while an array lives. So locks
            # belong to another open file description.
            self._descriptor = descriptor.reopened()
        finally:
            descriptor.close()  # now, as an error's traceback may keep it for long

    @classmethod
    def _make(
        cls,
        key: str,
        descriptor: Descriptor,
        byte_size: int,
        access: Access,
        deadline: float,
        publish: Callable[[Self], None],
    ) -> Self:
        """Allocate new memory, and map it; ``publish`` lets other processes find it."""
        try:
            access.give_to(descriptor.fileno())
            allocate(descriptor.fileno(), 0, byte_size, cls._room(), deadline)
        except BaseException as error:
            descriptor.close()  # now, as an error's traceback may keep it for long
            if getattr(error, "errno", None) in NO_SPACE:
                raise NoSharedMemoryError(cls._lack_of_room(byte_size)) from None
            raise
        segment = cls(key, descriptor, byte_size)
        segment._maker = os.getpid()
        try:
            publish(segment)
        except BaseException:  # an interrupt may come when others can already find the segment
            segment.unlink()
            segment.close()
            raise
        return segment

    @classmethod
    @translate_os_errors()
    def map(cls, file: SharedFile, byte_size: int) -> Self:
        """Map the first bytes of another process's checked file, and close the file."""
        try:
            return cls(file.key, file.descriptor, byte_size)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            reason = f"the server cannot map its {byte_size} bytes: {os.strerror(error.errno or 0)}"
            raise RegionRefusedError(file.field, reason) from None

    def grow(self, byte_size: int, deadline: float = math.inf) -> None:
        """Enlarge the memory, and map it anew; OSError if that fails, TimeoutError if it takes too long."""
        with contextlib.closing(self._descriptor.reopened()) as descriptor:  # not closed with this segment
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
        """Raise an error unless the owner still offers this memory, with the claimed bytes and without new holes."""

    @property
    @abstractmethod
    def is_unlinked(self) -> bool:
        """Whether no process can open this memory any more, as its owner has removed it, or it was closed here."""

    @abstractmethod
    def unlink(self) -> None:
        """Keep others from opening this memory; no effect in a forked child. Mappings stay valid. Twice is fine."""

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._map is None

    def fileno(self) -> int:
        """Return the open descriptor, which the segment owns; raises ClosedError once the segment is closed."""
        if self._map is None:
            raise ClosedError("this shared-memory segment")
        return self._descriptor.fileno()

    def prefault(self, deadline: float = math.inf) -> None:
        """Enter every page into this process' page tables, until the deadline; no effect before Linux 5.14.

        This works piece by piece, as the interpreter's other threads and signal handlers wait during each piece.
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
        """Close a segment that an interrupt left unclosed, and remove it if this process made it."""
        if getattr(self, "_map", None) is not None:
            if self._maker:
                self.unlink()
            self.close()

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while arrays over it live. Closing twice is fine."""
        self._map = None
        self._descriptor.close()

    after_fork = close


class SystemSegment(MappedSegment):
    """An object in /dev/shm. Its key is its name there, without a slash."""

    _room = staticmethod(free_bytes)

    @staticmethod
    def _lack_of_room(byte_size: int) -> str:
        return (
            f"shared memory of {byte_size} bytes was asked for, but /dev/shm has {free_bytes()} free of "
            f"{total_bytes()}; {MORE_ROOM}, or take less of it: release results sooner, or lower "
            "PoolOptions(max_bytes=...)"
        )

    @classmethod
    @translate_os_errors(
        failed="shared memory cannot be made in /dev/shm: {}; mount a tmpfs there that this user may write to"
    )
    def create(
        cls,
        key: str,
        byte_size: int,
        *,
        access: Access = PRIVATE,
        prepare: Callable[[MappedSegment], None] = lambda segment: None,
        deadline: float = math.inf,
    ) -> SystemSegment:
        """Make a new object with all its memory allocated. The object gets its name last, after ``prepare``."""
        descriptor = Descriptor(os.open, DEV_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, access.mode)

        def publish(segment: SystemSegment) -> None:
            prepare(segment)
            _give_name(segment.fileno(), key)

        return cls._make(key, descriptor, byte_size, access, deadline, publish)

    @classmethod
    def map_part(cls, file: SharedFile, offset: int, byte_size: int) -> SystemSegment:
        """Allocate the part of an object that will be used, map the whole object, and close the file."""
        file.check_size(offset + byte_size)
        file.take_space(offset, byte_size)
        return cls.map(file, file.status.st_size)

    def check(self, byte_size: int, field: str) -> None:
        """Raise an error unless the key still names this object, with all its bytes; takes one ``lstat``."""
        if self._map is None:
            raise RegionGoneError(f"{field} was unmapped")
        try:
            status = os.lstat(f"{DEV_SHM}/{self.key}")
        except FileNotFoundError:
            raise RegionGoneError(f"{field} was removed by its owner") from None
        except OSError as error:
            raise RegionGoneError(f"{field} is out of reach: {os.strerror(error.errno or 0)}") from None
        if (status.st_dev, status.st_ino) != self.identity:
            raise RegionGoneError(f"{field} was replaced by its owner")
        if not byte_size <= self.byte_size <= status.st_size:
            raise RegionRefusedError(
                field, f"it claims {byte_size} bytes, but {min(self.byte_size, status.st_size)} are there"
            )
        if status.st_blocks * BLOCK_SIZE < self.space:
            raise RegionRefusedError(field, f"it had memory for {self.space} bytes, and now has holes")

    @property
    def is_unlinked(self) -> bool:
        """Whether the object has lost its name, so that no process can open it any more, or was closed here."""
        return self._map is None or os.fstat(self.fileno()).st_nlink == 0

    def unlink(self) -> None:
        """Remove the object's name, if it is still this object's, and this is no forked child of its maker."""
        if self._maker not in (0, os.getpid()):
            return
        path = DEV_SHM / self.key
        with contextlib.suppress(OSError):  # the reaper removes an object that this cannot remove
            status = path.lstat()
            if (status.st_dev, status.st_ino) == self.identity:
                path.unlink()


def _give_name(fd: int, key: str) -> None:
    with contextlib.closing(Descriptor(os.open, DEV_SHM, os.O_PATH | os.O_CLOEXEC)) as directory:
        # Python calls linkat(2), which can follow /proc/self/fd, only with a directory's descriptor.
        os.link(f"/proc/self/fd/{fd}", key, dst_dir_fd=directory.fileno(), follow_symlinks=True)


class SealedSegment(MappedSegment):
    """A sealed memfd. Its key names a socket of its maker, and a number there."""

    _room = staticmethod(available_bytes)
    _offered: int | None = None  # the number under which its maker hands it out

    @staticmethod
    def _lack_of_room(byte_size: int) -> str:
        return (
            f"sealed memory of {byte_size} bytes was asked for, but this process may have {available_bytes():.0f} more "
            f"of {memory_bytes()}; {MORE_MEMORY}, or take less: release results sooner, or lower "
            "PoolOptions(max_bytes=...)"
        )

    @classmethod
    @translate_os_errors(failed='sealed memory cannot be made: {}; take other memory, by PoolOptions(region="system")')
    def create(
        cls,
        byte_size: int,
        token: bytes,
        *,
        access: Access = PRIVATE,
        prepare: Callable[[MappedSegment], None],
        deadline: float = math.inf,
    ) -> SealedSegment:
        """Make memory of whole pages, all of it allocated, and offer it after ``prepare`` was called."""

        def publish(segment: SealedSegment) -> None:
            prepare(segment)
            with contextlib.suppress(OSError):  # a limit on file sizes forbids this: then the memory cannot grow later
                os.ftruncate(segment.fileno(), max(byte_size, _MOST_BYTES))
            fcntl.fcntl(segment.fileno(), fcntl.F_ADD_SEALS, _SEALS)
            segment._offered = next(REGISTRY.numbers)
            segment.key = str(REGISTRY.offer(segment._offered, token, access, segment._descriptor.reopened))

        return cls._make("", _new_memfd(), byte_size, access, deadline, publish)

    def renew(self, token: bytes) -> None:
        """Replace the token that models must know to fetch the memory."""
        if self._offered is not None:
            REGISTRY.renew(self._offered, token)

    def check(self, byte_size: int, field: str) -> None:
        """Raise an error unless the owner lives and still offers the memory, and the memory has no new holes."""
        if self.is_unlinked:
            raise RegionGoneError(f"{field} was removed by its owner")
        if byte_size > self.byte_size:
            raise RegionRefusedError(field, f"it claims {byte_size} bytes, but {self.byte_size} are there")
        if os.fstat(self.fileno()).st_blocks * BLOCK_SIZE < self.space:
            raise RegionRefusedError(field, f"it had memory for {self.space} bytes, and now has holes")

    @property
    def is_unlinked(self) -> bool:
        """Whether the owner is dead or has removed the memory, or the memory was closed here."""
        if self._map is None:
            return True
        if self._maker:
            return self._offered is None
        return not locks.is_owner_alive(self.fileno())

    def unlink(self) -> None:
        """Stop handing out the memory, and release the owner's lease, which tells models that the memory is removed."""
        if self._offered is not None and self._maker == os.getpid():
            REGISTRY.withdraw(self._offered)
            locks.let_go_of_owner_lease(self.fileno())
            self._offered = None

    def close(self) -> None:
        """Close the segment. If this process made it, first remove it, as no process could find it again."""
        self.unlink()
        super().close()


def _new_memfd() -> Descriptor:
    """Return a new memfd, not executable if the kernel supports that, as some systems demand it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with contextlib.suppress(OSError):
        return Descriptor(os.memfd_create, _NAME, flags | _MFD_NOEXEC_SEAL)
    return Descriptor(os.memfd_create, _NAME, flags)
