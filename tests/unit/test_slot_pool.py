"""The client's slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from shm_backend_utils.client.pool import SlotPool

MEBIBYTE = 2**20


def resident_bytes(inode: int) -> int:
    """Return how much of the mappings of a file is in this process' page tables."""
    resident, is_of_the_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_of_the_file = f" {inode} " in line
        elif is_of_the_file and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


@pytest.mark.parametrize("prefault", [True, False])
def test_new_memory_is_in_the_page_tables_at_once_only_if_asked_for(prefault: bool) -> None:
    pool = SlotPool(prefault=prefault)
    slot, memory = pool.take(MEBIBYTE)
    path = Path("/dev/shm") / slot.claim().key
    assert (resident_bytes(path.stat().st_ino) >= MEBIBYTE) is prefault
    del memory
    pool.close()
