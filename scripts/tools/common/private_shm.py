"""A /dev/shm of a program's own."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["take_private_shm"]

_CLONE_NEWNS: Final = 0x20000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000


def take_private_shm(byte_size: int) -> bool:
    """Mount a /dev/shm that this process and its children alone see. Return whether that was permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={byte_size},mode=1777".encode()
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options) == 0
    )
