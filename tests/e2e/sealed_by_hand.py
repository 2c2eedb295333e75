"""Sealed regions that are made by hand, and handed over by a server that does what a test says."""

from __future__ import annotations

import fcntl
import os
from typing import Final

from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.protocol.layout import HEADER_LENGTH, PAGE_SIZE, Header, data_offset, write_header

__all__ = ["BYTE_SIZE", "NAME", "address", "region"]

NAME: Final = "by-hand"
TOKEN: Final = bytes(range(16))
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
BYTE_SIZE: Final = data_offset(1, PAGE_SIZE) + 4 * PAGE_SIZE


def region(*, claimed: int = BYTE_SIZE, size: int = BYTE_SIZE, space: int = BYTE_SIZE) -> Descriptor:
    made = Descriptor(os.memfd_create, NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    header = bytearray(HEADER_LENGTH)
    write_header(memoryview(header), Header(1, claimed, TOKEN))
    os.fchmod(made.fileno(), 0o600)
    os.ftruncate(made.fileno(), size)
    os.posix_fallocate(made.fileno(), 0, space)
    os.pwrite(made.fileno(), header, 0)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, SEALS)
    return made


def address(model: str, key: SealedKey) -> str:
    return f"2/{model}/{key}/{TOKEN.hex()}/0"
