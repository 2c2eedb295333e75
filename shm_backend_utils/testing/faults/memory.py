"""Shared memory that is taken away: truncated, with holes, or a ``/dev/shm`` that is small."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from ...memory.shared_file import DEV_SHM

__all__ = ["punch_hole", "take_private_shm", "take_space_beyond", "truncate"]

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE: Final = 2  # FALLOC_FL_PUNCH_HOLE
_CLONE_NEWNS: Final = 0x20000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000


def truncate(key: str, byte_size: int) -> None:
    """Change the size of an object in ``/dev/shm``.

    A process that touches mapped memory behind the new end gets a SIGBUS, which kills it.

    Parameters
    ----------
    key : str
        The object's name, with a slash before it or without one.
    byte_size : int
        The new size.
    """
    os.truncate(_path(key), byte_size)


def punch_hole(key: str, offset: int, byte_size: int) -> None:
    """Take the memory away that a part of an object in ``/dev/shm`` has; its size stays, and zeros are read there.

    Where ``/dev/shm`` is full, a process that touches the hole gets a SIGBUS.
    """
    _fallocate(_path(key), _KEEP_SIZE | _PUNCH_HOLE, offset, byte_size)


def take_space_beyond(key: str, offset: int, byte_size: int) -> None:
    """Give an object in ``/dev/shm`` memory behind its end; its size stays."""
    _fallocate(_path(key), _KEEP_SIZE, offset, byte_size)


def take_private_shm(byte_size: int) -> bool:
    """Mount a ``/dev/shm`` of so many bytes that this process, and those that it starts from now on, alone see.

    It cannot be undone. Return whether it was permitted: it takes ``CAP_SYS_ADMIN``, as root has it outside of most
    containers.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={byte_size},mode=1777".encode()
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options) == 0
    )


def _path(key: str) -> Path:
    return DEV_SHM / key.removeprefix("/")


def _fallocate(path: Path, mode: int, offset: int, byte_size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b") as file:
        if libc.fallocate(file.fileno(), mode, offset, byte_size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
