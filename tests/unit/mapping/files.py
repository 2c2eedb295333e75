"""Files in /dev/shm as their owners make them, honest or not, and what is done to them behind a model's back."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header

SHM: Final = Path("/dev/shm")
NOBODY: Final = 65534
TOKEN: Final = bytes(range(layout.TOKEN_LENGTH))


def new_key(prefix: str = "foreign") -> str:
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"


def region_bytes(byte_size: int = 2 * layout.PAGE_SIZE) -> bytes:
    """Return a managed region of one slot."""
    data = bytearray(byte_size)
    layout.write_header(memoryview(data), Header(1, byte_size, TOKEN, layout.PAGE_SIZE))
    return bytes(data)


def managed_file(key: str, byte_size: int) -> Path:
    """Make a managed region of one slot with nothing in it but its header, and holes else."""
    path = SHM / key
    path.write_bytes(region_bytes(byte_size)[: layout.PAGE_SIZE])
    os.truncate(path, byte_size)
    return path
