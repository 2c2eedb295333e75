"""The client's regions: how they are taken, given back, used again, and destroyed."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset
from tests.unit.taken_regions import REGION, Memory, is_there, take, used

SHM = Path("/dev/shm")
MEBIBYTE = 2**20


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have three of the smallest regions."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        yield pool


def resident_bytes(inode: int) -> int:
    """Return how much of the mappings of a file is in this process' page tables."""
    resident, is_of_the_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_of_the_file = f" {inode} " in line
        elif is_of_the_file and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def test_a_region_has_the_room_that_was_asked_for(pool: SlotPool) -> None:
    region, memory = take(pool, PAGE_SIZE)
    assert region.capacity >= PAGE_SIZE
    assert memory.nbytes == region.byte_size == pool.status.byte_size


@pytest.mark.parametrize(
    "derived",
    [
        lambda memory: memory,
        lambda memory: memory[10:],
        lambda memory: memory[10:][5:].reshape(-1, 1)[::2],
        lambda memory: memory.view(np.float32)[1:].T,
        lambda memory: np.ndarray((4,), np.int64, buffer=memory, offset=64),
        lambda memory: np.ndarray((4,), np.int64, buffer=memory)[1:],
        lambda memory: memoryview(memory[1:]),
        lambda memory: np.frombuffer(memory[8:], np.int16),
        lambda memory: np.from_dlpack(memory[3:]),
        iter,
    ],
    ids=[
        "itself",
        "view",
        "view of it",
        "dtype",
        "buffer",
        "view of that",
        "memoryview",
        "frombuffer",
        "dlpack",
        "iter",
    ],
)
def test_whatever_is_made_of_the_memory_holds_the_region(pool: SlotPool, derived: Callable[[Memory], Any]) -> None:
    _, memory = take(pool)
    last = derived(memory)
    del memory
    assert (pool.status.held, pool.status.idle) == (1, 0)
    del last
    assert (pool.status.held, pool.status.idle) == (0, 1)


def test_a_copy_of_the_memory_does_not_hold_the_region(pool: SlotPool) -> None:
    _, memory = take(pool)
    copy = memory.copy()
    del memory
    assert pool.status.held == 0
    assert copy.nbytes


def test_an_idle_region_is_to_be_had_without_a_ticket(pool: SlotPool) -> None:
    region = used(pool)
    taken = pool.take_idle(Need(region.capacity), Origin.here("take"))
    assert taken is not None
    assert taken[0] is region
    assert (pool.status.held, pool.status.idle) == (1, 0)
    del taken
    assert (pool.status.held, pool.status.idle) == (0, 1)


@pytest.mark.parametrize(
    ("byte_size", "slot_count", "group"), [(2 * PAGE_SIZE, 1, "direct"), (1, 2, "direct"), (1, 1, "triton-shm")]
)
def test_without_a_ticket_no_region_is_to_be_had_that_does_not_fit(
    pool: SlotPool, byte_size: int, slot_count: int, group: str
) -> None:
    assert pool.take_idle(Need(1), Origin.here("take")) is None
    assert pool.status.byte_size == 0, "without a ticket, nothing is made"
    used(pool)
    assert pool.take_idle(Need(byte_size, slot_count, group=group), Origin.here("take")) is None
    assert pool.status.idle == 1


def test_two_calls_at_once_have_regions_of_their_own(pool: SlotPool) -> None:
    first, first_memory = take(pool)
    second, second_memory = take(pool)
    assert first is not second
    assert not np.shares_memory(first_memory, second_memory)


def test_the_smallest_region_that_fits_is_used() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        taken = [take(pool, pages * PAGE_SIZE) for pages in (8, 2, 4)]
        regions = [region for region, _ in taken]
        del taken
        assert used(pool, 3 * PAGE_SIZE) is regions[2]


def test_of_several_idle_regions_the_one_that_was_used_last_is_used(pool: SlotPool) -> None:
    taken = [take(pool) for _ in range(3)]
    regions = [region for region, _ in taken]
    for index in (1, 2, 0):
        taken[index] = (regions[index], np.empty(0, np.uint8))
        pool.status  # noqa: B018  # looks at what was given back
    assert used(pool) is regions[0]
    assert used(pool) is regions[0]
    held, _memory = take(pool)
    assert held is regions[0]
    assert used(pool) is regions[2]


@pytest.mark.parametrize(
    ("first", "second"), [((1, "direct"), (2, "direct")), ((2, "direct"), (1, "direct")), ((1, "a"), (1, "b"))]
)
def test_regions_of_different_slot_counts_or_groups_are_never_exchanged(
    first: tuple[int, str], second: tuple[int, str]
) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        other = used(pool, 8 * PAGE_SIZE, *first)
        region = used(pool, 1, *second)
        assert region is not other
        assert [slot.index for slot in region.slots] == list(range(second[0]))


def test_regions_of_different_record_sizes_are_never_exchanged() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        used(pool)
        assert pool.take_idle(Need(1, record_byte_size=2 * PAGE_SIZE), Origin.here("take")) is None
        region, memory = pool.redeem(pool.request(Need(1, record_byte_size=2 * PAGE_SIZE), Origin.here("take")))
        assert region.slots[0].record.room == PAGE_SIZE
        assert memory.nbytes == data_offset(1, 2 * PAGE_SIZE) + region.capacity


def test_calls_of_about_the_same_size_fit_each_others_regions() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * MEBIBYTE))) as pool:
        assert used(pool, MEBIBYTE - 2 * PAGE_SIZE) is used(pool, MEBIBYTE)


def test_a_small_call_has_a_region_of_a_mebibyte() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * MEBIBYTE))) as pool:
        region = used(pool, MEBIBYTE)
        assert region.capacity == MEBIBYTE
        assert used(pool) is region


def test_a_spoiled_region_is_destroyed_and_what_is_like_it_is_still_used_again(pool: SlotPool) -> None:
    (spoiled, first), (kept, second) = take(pool), take(pool)
    spoiled.spoil("lost")
    del first, second
    assert (pool.status.held, pool.status.idle, pool.status.byte_size) == (0, 1, REGION)
    assert not is_there(spoiled)
    assert used(pool) is kept


def test_a_pool_that_is_closed_has_nothing_left(pool: SlotPool) -> None:
    regions = [used(pool), used(pool, group="triton-shm")]
    pool.close()
    assert not any(map(is_there, regions))
    assert pool.status.byte_size == 0


def test_memory_of_a_closed_pool_stays_valid(pool: SlotPool) -> None:
    region, memory = take(pool)
    memory[-1] = 42
    pool.close()
    assert not is_there(region)
    assert memory[-1] == 42
    del memory
    assert (pool.status.held, pool.status.idle) == (0, 0)


def test_what_a_region_has_on_gpus_goes_with_its_memory_when_the_pool_was_closed(pool: SlotPool) -> None:
    region, memory = take(pool)
    on_gpu = np.empty(1)
    gone = weakref.ref(on_gpu)
    region.device_memory[0] = on_gpu
    pool.close()
    del region, on_gpu
    assert gone() is not None
    del memory
    assert gone() is None


@pytest.mark.parametrize("prefault", [True, False])
def test_new_memory_is_in_the_page_tables_at_once_only_if_asked_for(prefault: bool) -> None:
    with contextlib.closing(SlotPool(PoolOptions(prefault=prefault))) as pool:
        region, memory = take(pool, MEBIBYTE)
        assert (resident_bytes((SHM / region.key).stat().st_ino) >= MEBIBYTE) is prefault
        assert memory.nbytes > MEBIBYTE


def held_by_this_process() -> tuple[int, int, int]:
    """Count open descriptors, mappings of shared memory, and shared-memory objects that this process made."""
    maps = Path("/proc/self/maps").read_text()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        maps.count(f"/dev/shm/shmbu-{os.getpid()}-"),
        len(list(SHM.glob(f"shmbu-{os.getpid()}-*"))),
    )


def is_no_more_than(before: tuple[int, int, int]) -> bool:
    """Return whether this process holds as much as before, or less: what others have left may be garbage by now."""
    return all(now <= then for now, then in zip(held_by_this_process(), before, strict=True))


def test_a_thousand_regions_made_one_after_another_leave_nothing() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        used(pool)
        before = held_by_this_process()
        keys = {used(pool, group=str(number)).key for number in range(1000)}
        assert len(keys) == 1000
        assert is_no_more_than(before)


def test_a_thousand_regions_taken_by_hundreds_are_hundreds_and_end_with_the_pool() -> None:
    before = held_by_this_process()
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=200 * REGION))) as pool:
        keys = set()
        for _ in range(5):
            taken = [take(pool) for _ in range(200)]
            keys |= {region.key for region, _ in taken}
            del taken
        assert len(keys) == pool.status.idle == 200
    assert is_no_more_than(before)
