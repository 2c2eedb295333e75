"""Files in /dev/shm as their owners make them, honest or not, and what is done to them behind a model's back."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Final

from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header
from shm_backend_utils.testing.faults.memory import take_private_shm

__all__ = ["NOBODY", "SHM", "TOKEN", "managed_file", "new_key", "said_on_a_small_machine", "small_shm"]

SHM: Final = Path("/dev/shm")
NOBODY: Final = 65534
TOKEN: Final = bytes(range(layout.TOKEN_LENGTH))
SMALL: Final = 1 << 20
"""Bytes of a small machine's /dev/shm."""


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


def small_shm() -> None:
    """Give this process a /dev/shm of its own, of ``SMALL`` bytes; exit with status 77 where that is not permitted."""
    if not take_private_shm(SMALL):
        sys.exit(77)


def said_on_a_small_machine(program: str) -> tuple[int, str]:
    """Run a program whose /dev/shm is small, and return its exit status and what it wrote; -7 is a SIGBUS."""
    head = "from tests.unit.mapping.files import *\nsmall_shm()\n"
    done = subprocess.run([sys.executable, "-c", head + program], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout
