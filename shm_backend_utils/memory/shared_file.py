"""Another process's shared memory, open but not mapped, for checks before it is touched; names of Triton's pools."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import stat
import time
from pathlib import Path, PurePath
from typing import Final

from ..errors import NoSharedMemoryError, RegionGoneError, RegionRefusedError
from ..protocol.layout import PAGE_SIZE
from .descriptors import NO_DESCRIPTORS, Descriptor, translate_os_errors

__all__ = [
    "BLOCK_SIZE",
    "DEV_SHM",
    "MORE_ROOM",
    "NO_SPACE",
    "USUAL_POOL_PREFIX",
    "SealedFile",
    "SharedFile",
    "allocate",
    "free_bytes",
    "is_pool",
    "open_by_name",
    "owner_refused",
    "prefix_of_pools",
    "total_bytes",
]

_SPACE_PIECE: Final = 128 * 2**20  # some tens of milliseconds
_OBSTACLES: Final = {errno.ELOOP: "it is a symbolic link", errno.EXDEV: "something is mounted there"}

DEV_SHM: Final = Path("/dev/shm")
BLOCK_SIZE: Final = 512
"""Bytes that ``st_blocks`` counts in (stat(2))."""

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG})
"""The errno values for a lack of room."""

MORE_ROOM: Final = (
    "give /dev/shm more room (docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted at /dev/shm)"
)
"""The remedy for a lack of room."""

USUAL_POOL_PREFIX: Final = "triton_python_backend_shm_region_"
_STUB: Final = "triton_python_backend_stub"  # the program that executes a model instance

_POOL_SUFFIX: Final = r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+)"
"""The backend's suffix for each model instance: a UUID; in old releases, a number."""


class SharedFile:
    """A regular file in /dev/shm, or a subclass's kind of file. A ``with`` statement closes it, and so does mapping it.

    No method touches the file's memory, so even a file that shrinks meanwhile can do no harm.
    """

    def __init__(self, key: str, descriptor: Descriptor, field: str) -> None:
        self.key = key
        self.field = field  # the file's name in messages
        self.descriptor = descriptor
        self.status = os.fstat(descriptor.fileno())  # as of the moment when the file was opened

    @classmethod
    @translate_os_errors()
    def open(cls, key: str, field: str) -> SharedFile:
        """Open another process's file, by its name without slashes, if it is a regular one."""
        try:
            descriptor = open_by_name(key)
        except FileNotFoundError:
            raise RegionGoneError(
                f"{field} does not exist on the server's machine; its owner removed it or died, "
                "or client and server do not share /dev/shm (containers: --ipc=host, or one shared /dev/shm volume)"
            ) from None
        except ValueError:  # a zero byte, or what has no encoding
            raise RegionRefusedError(field, "it has a key that no file can have") from None
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            reason = _OBSTACLES.get(error.errno or 0) or error.strerror
            raise RegionRefusedError(field, f"the server cannot open it: {reason}") from None
        file = cls(key, descriptor, field)
        if not stat.S_ISREG(file.status.st_mode):
            file.close()
            raise RegionRefusedError(field, "it is not a regular shared-memory object")
        return file

    def check_size(self, byte_size: int) -> None:
        """Raise RegionRefusedError unless the file is as large as claimed, and not empty."""
        if self.status.st_size == 0:
            raise RegionRefusedError(self.field, "it is empty")
        if self.status.st_size < byte_size:
            raise RegionRefusedError(self.field, f"it claims {byte_size} bytes, but {self.status.st_size} are there")

    def check_space(self, byte_size: int) -> None:
        """Raise RegionRefusedError unless the file has memory for so many bytes: touching a hole may kill a process."""
        space = self.status.st_blocks * BLOCK_SIZE
        if space < byte_size:
            raise RegionRefusedError(
                self.field,
                f"it has memory for {space} of its {byte_size} bytes, and holes; allocate all with posix_fallocate",
            )

    def take_space(self, offset: int, byte_size: int) -> None:
        """Allocate every byte of a part, so that a full /dev/shm causes no SIGBUS later."""
        if byte_size == 0:
            return
        try:
            allocate(self.descriptor.fileno(), offset, byte_size, free_bytes())
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise RegionRefusedError(self.field, f"the server cannot allocate it: {error.strerror}") from None
            raise NoSharedMemoryError(
                f"{self.field} has holes, and /dev/shm has {free_bytes()} bytes free for its {byte_size}; "
                f"{MORE_ROOM}, or register less"
            ) from None

    def read(self, byte_size: int) -> bytes:
        """Read the file's first bytes, without mapping them; return fewer if the file is shorter."""
        return os.pread(self.descriptor.fileno(), byte_size, 0)

    def close(self) -> None:
        """Close the file. Twice is fine."""
        self.descriptor.close()

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SealedFile(SharedFile):
    """A memfd, checked like any :class:`.SharedFile`, not for seals: a client may hand over a file without seals."""

    @classmethod
    def take(cls, key: str, received: Descriptor, field: str) -> SealedFile:
        """Reopen a received descriptor, for locks of its own, and close it; RegionRefusedError if it is not a memfd.

        The descriptor may be of any file: this makes no call that could block before it knows that the file is a memfd.
        If this raises, the descriptor may still be open.
        """
        _check_is_memfd(received, field)
        file = cls(key, _reopened(received, field), field)
        received.close()
        return file

    def check_space(self, byte_size: int) -> None:
        """Raise RegionRefusedError unless the file has memory for whole pages of ordinary size: huge ones may lack."""
        page_size = os.fstatvfs(self.descriptor.fileno()).f_bsize
        if page_size > PAGE_SIZE:
            raise RegionRefusedError(self.field, f"its pages have {page_size} bytes; expected pages of {PAGE_SIZE}")
        if byte_size % PAGE_SIZE:
            raise RegionRefusedError(self.field, f"it claims {byte_size} bytes; expected whole pages of {PAGE_SIZE}")
        super().check_space(byte_size)


def _check_is_memfd(received: Descriptor, field: str) -> None:
    """Raise RegionRefusedError unless the file is a memfd; other calls may block, such as fstat on a FUSE file."""
    try:
        fcntl.fcntl(received.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        raise RegionRefusedError(field, "its client handed over no memfd; expected a sealed one") from None


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


def open_by_name(key: str) -> Descriptor:
    """Open a file of /dev/shm, unless something is mounted there (EXDEV): a file of FUSE could block for ever."""
    with (
        contextlib.closing(Descriptor(os.open, DEV_SHM / key, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as place,
        contextlib.closing(Descriptor(os.open, DEV_SHM, os.O_PATH | os.O_CLOEXEC)) as folder,
    ):
        if _mount_of(place) != _mount_of(folder):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return place.reopened()


def _mount_of(descriptor: Descriptor) -> str:
    """Return the id of the mount that a file is in (proc_pid_fdinfo(5))."""
    lines = Path(f"/proc/self/fdinfo/{descriptor.fileno()}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))


def owner_refused(field: str, uid: int) -> RegionRefusedError:
    """Return the error about a region of a user whom the model's configuration does not allow."""
    return RegionRefusedError(
        field,
        f"it belongs to user {uid}, whom the model's SHM_ALLOWED_UIDS does not allow; add the id to that parameter in "
        "config.pbtxt, if you trust this user",
    )


def prefix_of_pools() -> str:
    """Return the prefix of the names of the backend's pools."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return USUAL_POOL_PREFIX
    if PurePath(words[0]).name != _STUB or len(words) < 3:
        return USUAL_POOL_PREFIX
    found = re.fullmatch(f"(.*?){_POOL_SUFFIX}", words[2], re.DOTALL)
    return USUAL_POOL_PREFIX if found is None else found[1]


def is_pool(key: str, prefix: str) -> bool:
    """Return whether an object of such a name, without a leading slash, is one of the backend's pools."""
    return key.startswith(USUAL_POOL_PREFIX) or re.fullmatch(re.escape(prefix) + _POOL_SUFFIX, key) is not None


def free_bytes() -> float:
    """Return how many bytes /dev/shm has free: infinity without a limit, 0 if it does not exist."""
    try:
        space = os.statvfs(DEV_SHM)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize if space.f_blocks else math.inf  # a tmpfs without a limit has 0 blocks


def total_bytes() -> int:
    """Return the size of /dev/shm, or the machine's memory if it has no limit."""
    try:
        space = os.statvfs(DEV_SHM)
    except OSError:
        return 0
    return space.f_blocks * space.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate(fd: int, offset: int, byte_size: int, room: float, deadline: float = math.inf) -> None:
    """Allocate every byte of a part of a file: a full /dev/shm must fail here, not as a SIGBUS at first touch.

    OSError with a number in ``NO_SPACE`` if ``room`` is too small. With a deadline, this allocates piece by piece, and
    raises TimeoutError after the deadline. Without a deadline, the kernel frees all again if it cannot allocate all.
    """
    if byte_size - os.fstat(fd).st_blocks * BLOCK_SIZE > room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    end = offset + byte_size
    piece = _SPACE_PIECE if deadline < math.inf else max(byte_size, 1)
    for begin in range(offset, max(end, offset + 1), piece):  # once even for 0 bytes, which the kernel refuses
        if time.monotonic() > deadline:
            raise TimeoutError(f"{byte_size} bytes of shared memory could not be allocated in time")
        os.posix_fallocate(fd, begin, min(piece, end - begin))
