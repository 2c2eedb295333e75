"""What the tests of this folder register, and how they look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.registry import Registry

SHM = Path("/dev/shm")
PAGE = 4096

MakeFile = Callable[..., str]


def register(manager: SharedMemoryManager, name: str, key: str, offset: int = 0, byte_size: int = PAGE) -> MappedRegion:
    manager.register_system_shared_memory(name, key, offset, byte_size)
    return region_of(manager, name)


def region_of(manager: SharedMemoryManager, name: str) -> MappedRegion:
    found = registry_of(manager).find(name)
    assert found is not None
    return found[0]


def registry_of(manager: SharedMemoryManager) -> Registry:
    return manager._registry


def is_mapped(key: str) -> bool:
    return f"{SHM}/{key}" in Path("/proc/self/maps").read_text()
