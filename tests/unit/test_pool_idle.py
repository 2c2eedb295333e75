"""Regions that nobody has: idle ones, which stay for a while, and those in which a model may still be at work.

A slot in doubt waits until it is certain that no model is at work in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.pool.inventory import Inventory, Kind, Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset, record_offset
from tests.unit.taken_regions import REGION, is_there, take

SHM = Path("/dev/shm")
KIND: Kind = Need(1)[1:]


@pytest.fixture
def inventory() -> Iterator[Inventory]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
        taken = [take(pool) for _ in range(2)]
        taken.clear()
        yield pool._inventory


TWO_SLOTS = data_offset(2, PAGE_SIZE) + PAGE_SIZE
"""What a region of two slots takes of the budget."""
LONG_S = 30.0


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=TWO_SLOTS))) as pool:
        yield pool


@contextlib.contextmanager
def executing(region: SlotRegion, slot: int = 0) -> Iterator[None]:
    """Hold the lease of a region as a model does, through a description of its own."""
    fd = os.open(SHM / region.key, os.O_RDWR)
    try:
        lease = SlotLease(fd, record_offset(slot, PAGE_SIZE))
        assert lease.take()
        yield
        lease.give_back()
    finally:
        os.close(fd)


def use(pool: SlotPool, *slots_in_doubt: int, spoil: bool = False) -> SlotRegion:
    """Take a region and give it back, with some of its slots in doubt."""
    region, memory = take(pool, slot_count=2)
    for slot in slots_in_doubt:
        region.slots[slot].state = "sent"
    if spoil:
        region.spoil("lost")
    del memory
    return region


def test_requests_that_are_still_on_their_way_become_stale_before_the_region_is_used_again(pool: SlotPool) -> None:
    region = use(pool)
    generations = [slot.record.generation for slot in region.slots]
    assert use(pool, 1) is use(pool) is region
    assert [slot.record.generation for slot in region.slots] == [generations[0], generations[1] + 1]
    assert region.slots[1].generation == region.slots[1].record.generation


def test_a_region_in_doubt_in_which_a_model_executes_waits_in_quarantine(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region):
        assert use(pool, 0) is region
        status = pool.status
        assert (status.held, status.idle, status.quarantined, status.byte_size) == (0, 0, 1, TWO_SLOTS)
        assert pool.take_idle(Need(1, 2), "use") is None
        assert not pool.request(Need(1, 2), "use").granted.done(), "nobody gets it"
        waiter = pool.request(Need(1, 1, group="triton-shm"), "use")
        assert not waiter.granted.done(), "it makes no way"
        assert is_there(region)
        assert "0 slots are held" in str(pool.exhausted(waiter, 1))
        assert "1 more are in quarantine" in str(pool.exhausted(waiter, 1))


def test_who_waits_gets_the_region_when_the_model_has_finished(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region):
        use(pool, 0)
        waiter = pool.request(Need(1, 2), "use")
        assert not waiter.granted.done()
    assert waiter.granted.result(LONG_S) is region
    assert pool.status.quarantined == 0


def test_one_slot_in_which_a_model_executes_keeps_the_whole_region_in_quarantine(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region, slot=1):
        use(pool, 0, 1)
        assert pool.status.quarantined == 1
        assert [slot.state for slot in region.slots] == ["free", "sent"]


def test_a_spoiled_region_is_destroyed_although_a_model_executes_in_it(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region):
        assert use(pool, 0, spoil=True) is region
        assert (pool.status.quarantined, pool.status.byte_size) == (0, 0)
        assert not is_there(region)


def test_a_region_that_an_interrupt_left_in_nobodys_hands_is_destroyed_when_it_is_so_for_seconds(
    inventory: Inventory,
) -> None:
    lost, found_again = (inventory.take(1, KIND) for _ in range(2))
    assert lost is not None
    assert found_again is not None
    inventory.destroy_lost([])
    assert inventory.lost_since.keys() == {lost, found_again}
    inventory.put_back(found_again)
    inventory.destroy_lost([])
    assert is_there(lost)
    inventory.lost_since[lost] -= 60
    inventory.destroy_lost([])
    assert (is_there(lost), is_there(found_again)) == (False, True)
    assert inventory.byte_size == found_again.byte_size
    inventory.destroy_lost([])
    assert inventory.lost_since == {}


def test_a_region_that_is_held_is_not_lost(inventory: Inventory) -> None:
    held = inventory.take(1, KIND)
    assert held is not None
    inventory.destroy_lost([held])
    assert inventory.lost_since == {}
    inventory.returned.append(held)
    inventory.destroy_lost([])
    assert inventory.lost_since == {}
    inventory.sort_returned()
