"""POSIX shared memory: create, open, identify, unlink. shm_open(3) is open(2) in ``/dev/shm`` (shm_overview(7))."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable

from ..errors import NoSharedMemoryError, RegionGoneError, RegionRefusedError
from ..process import call_after_fork
from .access import PRIVATE, Access
from .descriptors import Descriptor, translate_os_errors
from .mapped_segment import MappedSegment
from .shared_file import (
    BLOCK_SIZE,
    DEV_SHM,
    MORE_ROOM,
    NO_SPACE,
    SharedFile,
    allocate,
    free_bytes,
    total_bytes,
)

__all__ = ["SystemSegment"]


class SystemSegment(MappedSegment):
    """An object in /dev/shm. Its key is its name there, without a slash."""

    _room = staticmethod(free_bytes)

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
        """Make a new object with all of its space taken. It gets its name last, when ``prepare`` was called with it."""
        descriptor = Descriptor(os.open, DEV_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, access.mode)
        call_after_fork(descriptor)  # other threads may fork meanwhile
        try:
            access.give_to(descriptor.fileno())
            allocate(descriptor.fileno(), 0, byte_size, free_bytes(), deadline)
        except BaseException as error:
            descriptor.close()  # here, as an error may keep it for long
            if getattr(error, "errno", None) in NO_SPACE:
                raise _no_space(byte_size) from None
            raise
        segment = cls._make(key, descriptor, byte_size, prepare)
        try:
            _give_name(segment.fileno(), key)
        except BaseException:  # an interrupt may come when it has its name
            segment.unlink()
            segment.close()
            raise
        return segment

    @classmethod
    def open(cls, key: str, byte_size: int, field: str) -> SystemSegment:
        """Map an object of any other process as a whole; its key has no slashes."""
        with SharedFile.open(key, field) as file:
            return cls.map_part(file, 0, byte_size)

    @classmethod
    def map_part(cls, file: SharedFile, offset: int, byte_size: int) -> SystemSegment:
        """Map an object as a whole, when the part that will be used has memory. It takes the descriptor."""
        file.check_size(offset + byte_size)
        file.take_space(offset, byte_size)
        return cls.map(file, file.status.st_size)

    def check(self, byte_size: int, field: str) -> None:
        """Raise unless its key still names the object, with its bytes, by one ``lstat``."""
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
        """Whether the object has lost its name, so that it can no longer be opened, or was closed here."""
        return self._map is None or os.fstat(self.fileno()).st_nlink == 0

    def unlink(self) -> None:
        """Remove the object's name, if it is still this object's, and this is no forked child of its maker."""
        if self._maker not in (0, os.getpid()):
            return
        path = DEV_SHM / self.key
        with contextlib.suppress(OSError):  # what cannot be removed now stays for the reaper
            status = path.lstat()
            if (status.st_dev, status.st_ino) == self.identity:
                path.unlink()


def _give_name(fd: int, key: str) -> None:
    directory = Descriptor(os.open, DEV_SHM, os.O_PATH | os.O_CLOEXEC)
    try:
        # Only with a directory's descriptor does Python call linkat(2), which alone can follow /proc/self/fd.
        os.link(f"/proc/self/fd/{fd}", key, dst_dir_fd=directory.fileno(), follow_symlinks=True)
    finally:
        directory.close()


def _no_space(byte_size: int) -> NoSharedMemoryError:
    return NoSharedMemoryError(
        f"shared memory of {byte_size} bytes was asked for, but /dev/shm has {free_bytes()} free of {total_bytes()}; "
        f"{MORE_ROOM}, or take less of it: release results sooner, or lower PoolOptions(max_bytes=...)"
    )
