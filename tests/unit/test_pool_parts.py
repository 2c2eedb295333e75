"""Regions that several calls share: made where many come at once, and gone together."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.taken_regions import REGION, Memory, is_there, take

ALONE = 4  # so many calls have a region each


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool with much room."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**24))) as pool:
        yield pool


def taken(pool: SlotPool, count: int) -> list[tuple[SlotRegion, Memory]]:
    return [take(pool) for _ in range(count)]


def shared(regions: list[tuple[SlotRegion, Memory]]) -> list[tuple[SlotRegion, Memory]]:
    """Return those of which others have parts."""
    return regions[ALONE:]


def test_the_more_calls_there_are_the_more_share_the_next_region(pool: SlotPool) -> None:
    sizes = Counter(region.key for region, _ in taken(pool, 300))
    assert list(sizes.values()) == [1] * ALONE + [8, 24, 72, 192]


def test_calls_of_one_region_have_a_slot_and_data_of_their_own(pool: SlotPool) -> None:
    calls = shared(taken(pool, 24))
    assert len({region.key for region, _ in calls}) == 2
    for region, _ in calls:
        assert region.data_offset + region.capacity == region.data_end <= region.byte_size
    for (one, its), (other, others) in itertools.pairwise(calls):
        if one.key == other.key:
            assert one.slots[0].address_pattern != other.slots[0].address_pattern
            assert one.data_end <= other.data_offset or other.data_end <= one.data_offset
            assert np.shares_memory(its, others)  # offsets are the region's in each


def test_a_region_with_a_slot_in_doubt_gives_back_the_others(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    doubted = calls[-1][0]
    doubted.slots[0].is_in_doubt = True
    with contextlib.closing(ManagedRegion.open(doubted.key, doubted.token, "region")) as opened:
        assert opened.lease(doubted.slots[0].index).take()
        del calls
        assert (pool.status.idle, pool.status.quarantined) == (11, 1)
    assert (pool.status.idle, pool.status.quarantined) == (12, 0)


def test_idle_memory_goes_when_all_of_its_calls_are_over(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    (region, kept), size = calls[-1], pool.status.byte_size
    del calls
    pool.drop_idle()
    assert (pool.status.held, pool.status.idle) == (1, 7)
    assert pool.status.byte_size == size - ALONE * REGION == region.byte_size
    kept[region.data_offset] = 1
    del kept
    pool.drop_idle()
    assert pool.status.byte_size == 0
    assert not is_there(region)


def test_idle_regions_make_room_for_another_with_all_of_their_parts() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=20 * REGION))) as pool:
        calls = taken(pool, 12)
        small = calls[-1][0]
        del calls
        large, _ = take(pool, 19 * REGION - 2 * PAGE_SIZE)
        assert pool.status.byte_size == large.byte_size <= 20 * REGION
        assert not is_there(small)


def test_they_outlive_the_pool_with_the_last_array(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    pool.close()
    for number, (region, memory) in enumerate(calls):
        memory[-1] = number
        assert not is_there(region)
    assert calls[-1][1][-1] == 11


def test_one_that_is_spoiled_leaves_the_others(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    calls[-1][0].is_spoiled = True
    key, other = calls[-1][0].key, calls[-2][0]
    del calls
    assert (pool.status.idle, pool.status.quarantined) == (11, 0)
    assert is_there(other)
    assert [region.key for region, _ in taken(pool, 11)].count(key) == 7


@pytest.mark.parametrize("room", [20, 30])
def test_they_are_fewer_where_the_budget_ends(room: int) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=room * REGION))) as pool:
        calls = taken(pool, room)
        assert pool.status.byte_size <= room * REGION
        assert pool.status.held == len(calls)


def test_where_the_machine_has_no_room_for_all_one_is_made(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = taken(pool, ALONE)
    make, asked = ManagedRegion.create, []

    def create(byte_size: int, slot_count: int, *rest: object) -> ManagedRegion:
        asked.append(slot_count)
        if slot_count > 1:
            raise MachineError("no room")
        return make(byte_size, slot_count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ManagedRegion, "create", create)
    calls.append(take(pool))
    assert asked == [2 * ALONE, 1]
    assert pool.status.byte_size == (ALONE + 1) * REGION
