"""POSIX shared memory: create, open, identify, unlink. One class, one mapping, no protocol.

On Linux, ``shm_open("/key")`` is ``open("/dev/shm/key")`` (shm_overview(7)), which is what this module does; unlike
``multiprocessing.shared_memory`` it has no resource tracker that unlinks a region because somebody else exited.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Final

from ..errors import ClosedError, NoSharedMemoryError, RegionGoneError, RegionRefusedError
from ..forks import forsake_in_children
from .access import PRIVATE, Access
from .descriptors import NO_DESCRIPTORS, lack_of_descriptors_told
from .shared_file import BLOCK_SIZE, DIRECTORY, MORE_ROOM, NO_SPACE, SharedFile, allocate, free_bytes, total_bytes

__all__ = ["SystemSegment"]

_MADV_POPULATE_WRITE: Final = 23  # madvise(2); the mmap module has no name for it
_PREFAULT_PIECE: Final = 4 * 2**20  # about a millisecond


class SystemSegment:
    """A shared-memory object, mapped readable and writable as a whole.

    The descriptor lives until :meth:`close`. The mapping lives until the last array over it is gone, whatever happens
    to the segment, the object's name or its owner; its memory is freed by the kernel with the last mapping.

    Attributes
    ----------
    key : str
        The object's name, without a leading slash.
    byte_size : int
        Bytes mapped.
    identity : tuple of int
        Device and inode: what the mapping *is*, where the key is only what it was called.
    space : int
        Bytes of it that had memory when it was mapped, and no holes.
    """

    def __init__(self, key: str, fd: int, byte_size: int) -> None:
        """Map ``byte_size`` bytes of an open descriptor; the segment owns the descriptor from here on."""
        self.key = key
        self.byte_size = byte_size
        self._fd = fd
        self._maker = 0  # the process that has made the object; 0 if it was somebody else
        self._map: mmap.mmap | None = None
        try:
            status = os.fstat(fd)
            self.identity = (status.st_dev, status.st_ino)
            self.space = min(byte_size, status.st_blocks * BLOCK_SIZE)
            self._map = mmap.mmap(fd, byte_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    @lack_of_descriptors_told()
    def create(
        cls,
        key: str,
        byte_size: int,
        *,
        access: Access = PRIVATE,
        prepare: Callable[[SystemSegment], None] = lambda segment: None,
        deadline: float = math.inf,
    ) -> SystemSegment:
        """Make a new object of this size, with all of its space taken.

        It gets its name last. So nobody sees it half made, and if this process dies before, nothing is left.

        Parameters
        ----------
        key : str
            Its name, without a leading slash.
        byte_size : int
            Of the whole object.
        access : Access
            Who may open it.
        prepare : callable
            Called with the segment before others can open it.
        deadline : float
            When its space must be taken, by ``time.monotonic()``.

        Raises
        ------
        MachineError
            The machine has not that much shared memory left, or this process no file descriptors.
        TimeoutError
            Taking its space takes longer.
        FileExistsError
            The key is taken.
        """
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, access.mode)
        try:
            os.fchmod(fd, access.mode)  # whatever the umask says
            if access.group_id is not None:
                os.fchown(fd, -1, access.group_id)
            allocate(fd, 0, byte_size, deadline)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise _no_space(byte_size) from None
            raise
        segment = cls(key, fd, byte_size)
        segment._maker = os.getpid()
        try:
            # The mapping has a descriptor of its own, which a forked child cannot close while an array lives. So what
            # is locked belongs to another open file description.
            segment._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.close(fd)
            forsake_in_children(segment)
            prepare(segment)
            _give_name(segment._fd, key)
        except BaseException:  # an interrupt may come when it has its name
            segment.unlink()
            segment.close()
            raise
        return segment

    @classmethod
    def open(cls, key: str, byte_size: int, field: str) -> SystemSegment:
        """Map an object that somebody else made, whoever that is, as a whole.

        Parameters
        ----------
        key : str
            Its name, without slashes.
        byte_size : int
            How large it is at least, as somebody claims.
        field : str
            What to call it in messages.

        Raises
        ------
        RegionGoneError
            There is no such object.
        RegionRefusedError
            It is not a regular file, may not be opened by this user, is smaller than claimed, or cannot be mapped.
        MachineError
            It has holes, and /dev/shm has no memory for them, or this process no file descriptors.
        """
        with SharedFile.open(key, field) as file:
            return cls.map_part(file, 0, byte_size)

    @classmethod
    def map_part(cls, file: SharedFile, offset: int, byte_size: int) -> SystemSegment:
        """Map an object as a whole, after a part of it was given memory.

        Parameters
        ----------
        file : SharedFile
            The object, which was checked otherwise. The segment takes its descriptor.
        offset, byte_size : int
            The part that will be used.

        Raises
        ------
        RegionRefusedError
            It is smaller, or cannot be mapped.
        MachineError
            It has holes, and /dev/shm has no memory for them, or this process no file descriptors.
        """
        file.check_size(offset + byte_size)
        file.take_space(offset, byte_size)
        return cls.map(file, file.status.st_size)

    @classmethod
    @lack_of_descriptors_told()
    def map(cls, file: SharedFile, byte_size: int) -> SystemSegment:
        """Map the first bytes of an object, which was checked; raises as :meth:`map_part`."""
        try:
            descriptor = file.detach()
            fd = os.dup(descriptor.fileno())
            descriptor.close()
            return cls(file.key, fd, byte_size)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            reason = f"the server cannot map its {byte_size} bytes: {os.strerror(error.errno or 0)}"
            raise RegionRefusedError(file.field, reason) from None

    def check(self, byte_size: int, field: str) -> None:
        """Raise unless its key still names the object, with as many bytes as claimed and as much memory as it had.

        One ``lstat``: for every request.

        Raises
        ------
        RegionGoneError
            The owner has removed it, or the key names another object.
        RegionRefusedError
            More is claimed than is mapped, or the object was truncated, or has holes that it had not.
        """
        if self._map is None:
            raise RegionGoneError(f"{field} was unmapped")
        try:
            status = os.lstat(f"{DIRECTORY}/{self.key}")
        except FileNotFoundError:
            raise RegionGoneError(f"{field} was removed by its owner") from None
        if (status.st_dev, status.st_ino) != self.identity:
            raise RegionGoneError(f"{field} was replaced by its owner")
        if not byte_size <= self.byte_size <= status.st_size:
            raise RegionRefusedError(
                field, f"it claims {byte_size} bytes, but {min(self.byte_size, status.st_size)} are there"
            )
        if status.st_blocks * BLOCK_SIZE < self.space:
            raise RegionRefusedError(field, f"it had memory for {self.space} bytes, and now has holes")

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._map is None

    @property
    def is_unlinked(self) -> bool:
        """Whether the object has lost its name, so that nobody new can open it, or was closed here."""
        return self._map is None or os.fstat(self._fd).st_nlink == 0

    def fileno(self) -> int:
        """Return the open descriptor, which the segment owns; raises ClosedError once it is closed."""
        if self._map is None:
            raise ClosedError("this shared-memory segment")
        return self._fd

    def prefault(self, deadline: float = math.inf) -> None:
        """Enter every page into this process' page tables, which first use would do one by one, each at a fault's cost.

        Piece by piece, as the interpreter's other threads, and signals, wait meanwhile, and until a moment by
        ``time.monotonic()``: the rest is left to first use. A kernel before 5.14 cannot; then this does nothing.
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

    def unlink(self) -> None:
        """Remove the object's name, if it is still this object's. Mappings of it stay valid.

        Nothing happens in a forked child of the process that has made it.
        """
        if self._maker not in (0, os.getpid()):
            return
        path = DIRECTORY / self.key
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if (status.st_dev, status.st_ino) == self.identity:
                path.unlink()

    def __del__(self) -> None:
        """Remove what this process has made and then lost, by an interrupt before anybody could keep it or close it."""
        if self._map is not None:
            if self._maker:
                self.unlink()
            self.close()

    def forsake(self) -> None:
        """Let go of the parent's descriptor in a forked child, which would keep the parent's locks alive."""
        self.close()

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while arrays over it live. Closing twice is fine."""
        if self._map is not None:
            self._map = None
            os.close(self._fd)


def _give_name(fd: int, key: str) -> None:
    directory = os.open(DIRECTORY, os.O_PATH | os.O_CLOEXEC)
    try:
        # Only with a directory's descriptor does Python call linkat(2), which alone can follow /proc/self/fd.
        os.link(f"/proc/self/fd/{fd}", key, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _no_space(byte_size: int) -> NoSharedMemoryError:
    return NoSharedMemoryError(
        f"shared memory of {byte_size} bytes was asked for, but /dev/shm has {free_bytes()} free of {total_bytes()}; "
        f"{MORE_ROOM}, or take less of it: release results sooner, or lower PoolOptions(max_bytes=...)"
    )
