"""Files in /dev/shm as their owners make them, honest or not, and what is done to them behind a model's back."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Final

from scripts.tools.common.private_shm import take_private_shm
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header

__all__ = [
    "NOBODY",
    "SHM",
    "TOKEN",
    "managed_file",
    "new_key",
    "punch_hole",
    "said_on_a_small_machine",
    "small_shm",
    "take_space_beyond",
]

SHM: Final = Path("/dev/shm")
NOBODY: Final = 65534
TOKEN: Final = bytes(range(layout.TOKEN_LENGTH))
SMALL: Final = 1 << 20
"""Bytes of a small machine's /dev/shm."""

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


def new_key(prefix: str = "foreign") -> str:
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def managed_file(key: str, byte_size: int) -> Path:
    """Make a managed region of one slot with nothing in it but its header, and holes else."""
    data = bytearray(layout.PAGE_SIZE)
    layout.write_header(memoryview(data), Header(1, byte_size, TOKEN, layout.PAGE_SIZE))
    path = SHM / key
    path.write_bytes(data)
    os.truncate(path, byte_size)
    return path


def punch_hole(path: Path, offset: int, byte_size: int) -> None:
    """Take the memory away that a part of a file has; its size stays."""
    _fallocate(path, _KEEP_SIZE | _PUNCH_HOLE, offset, byte_size)


def take_space_beyond(path: Path, offset: int, byte_size: int) -> None:
    """Give a file memory behind its end; its size stays."""
    _fallocate(path, _KEEP_SIZE, offset, byte_size)


def _fallocate(path: Path, mode: int, offset: int, byte_size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b") as file:
        assert libc.fallocate(file.fileno(), mode, offset, byte_size) == 0


def small_shm() -> None:
    """Give this process a /dev/shm of its own, of ``SMALL`` bytes; exit with status 77 where that is not permitted."""
    if not take_private_shm(SMALL):
        sys.exit(77)


def said_on_a_small_machine(program: str) -> tuple[int, str]:
    """Run a program whose /dev/shm is small, and return its exit status and what it wrote; -7 is a SIGBUS."""
    head = "from tests.unit.mapping.files import *\nsmall_shm()\n"
    done = subprocess.run([sys.executable, "-c", head + program], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout
