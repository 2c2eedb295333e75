"""Regions that a test takes out of a pool, as calls do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import Memory, SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

__all__ = ["REGION", "SHM", "Memory", "is_there", "own_files", "take", "used"]

SHM: Final = Path("/dev/shm")

REGION: Final = data_offset(1, PAGE_SIZE) + PAGE_SIZE
"""What the smallest region takes of the budget."""


def take(
    pool: SlotPool, byte_size: int = 1, slot_count: int = 1, group: str = "direct", holder: object = "take"
) -> tuple[SlotRegion, Memory]:
    """Take a region that there is room for, as a call does."""
    waiter = pool.request(Need(byte_size, slot_count, group=group), holder)
    assert waiter.granted.done()
    return pool.take_granted(waiter)


def used(pool: SlotPool, byte_size: int = 1, slot_count: int = 1, group: str = "direct") -> SlotRegion:
    region, _ = take(pool, byte_size, slot_count, group)
    return region


def is_there(region: SlotRegion) -> bool:
    return (SHM / region.key).exists()


def own_files() -> set[Path]:
    return set(SHM.glob(f"shmbu-{os.getpid()}-*"))
