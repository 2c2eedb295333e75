"""A manager of shared memory, and files to register there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from tests.unit.manager.registering import PAGE, SHM, MakeFile


@pytest.fixture
def make_file() -> Iterator[MakeFile]:
    """Make a file of random bytes in /dev/shm and return its key."""
    keys: list[str] = []

    def make(byte_size: int = PAGE) -> str:
        key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
        keys.append(key)
        (SHM / key).write_bytes(os.urandom(byte_size))
        return key

    yield make
    for key in keys:
        (SHM / key).unlink(missing_ok=True)


@pytest.fixture
def manager() -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager()
    yield manager
    manager.unregister_all()
