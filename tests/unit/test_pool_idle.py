"""Regions that nobody has: idle ones, which stay for a while, and those in which a model may still be at work.

Who takes an idle one without the lock has it, whatever is done to the idle ones. A slot in doubt waits until it is
certain that no model is at work in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.pool.inventory import Inventory, Kind
from shm_backend_utils.memory.pool.need import Need, Ticket
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset, record_offset

SHM = Path("/dev/shm")
KIND: Kind = Need(1)[1:]


def asking(byte_size: int, group: str = "direct") -> Ticket:
    """Return a ticket for a region that takes so much of the budget."""
    return Ticket(Need(byte_size - data_offset(1, PAGE_SIZE), group=group), byte_size, "a test")


@pytest.fixture
def inventory() -> Iterator[Inventory]:
    """One that is full with two idle regions."""
    first, second = (SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE) for _ in range(2))
    inventory = Inventory(first.byte_size + second.byte_size)
    with contextlib.ExitStack() as at_end:
        at_end.callback(inventory.destroy_all)
        for region in (first, second):
            ticket = asking(region.byte_size)
            assert inventory.grant(ticket)
            assert ticket.idle is None
            inventory.redeem(ticket)
            inventory.add([region], ticket)
        for region in (first, second):
            inventory.put_back(region)
        yield inventory


def is_there(region: SlotRegion) -> bool:
    return (SHM / region.key).exists()


def test_a_region_goes_when_it_has_been_idle_since_before_a_moment_and_not_at_it(inventory: Inventory) -> None:
    first, second = inventory.idle
    first.idle_since, second.idle_since = 10.0, 20.0
    inventory.destroy_idle(before=10.0)
    assert (is_there(first), is_there(second)) == (True, True)
    inventory.destroy_idle(before=20.0)
    assert (is_there(first), is_there(second)) == (False, True)
    assert inventory.byte_size == second.byte_size


def test_a_region_that_was_taken_and_has_no_holder_yet_does_not_go_with_the_idle_ones(inventory: Inventory) -> None:
    taken = inventory.take(1, KIND)
    assert taken is not None
    assert taken in inventory.idle  # as its taker has not said that it has it
    inventory.destroy_idle()
    assert is_there(taken)
    assert inventory.byte_size == taken.byte_size


def test_a_region_that_was_taken_and_has_no_holder_yet_makes_no_room_for_others(inventory: Inventory) -> None:
    taken = inventory.take(1, KIND)
    assert taken is not None
    (other,) = [region for region in inventory.idle if region is not taken]
    assert not inventory.grant(asking(inventory.max_bytes, "forward"))
    assert is_there(taken)
    assert not is_there(other), "it had made room before that was seen"
    assert inventory.byte_size == taken.byte_size


def test_of_another_kind_the_region_goes_that_was_idle_the_longest(inventory: Inventory) -> None:
    first, second = inventory.idle
    first.idle_since, second.idle_since = 20.0, 10.0
    ticket = asking(first.byte_size, "forward")
    assert inventory.grant(ticket)
    assert (is_there(first), is_there(second)) == (True, False)
    assert inventory.byte_size == inventory.max_bytes
    for _ in range(2):
        inventory.take_back(ticket)
        assert inventory.byte_size == first.byte_size


TWO_SLOTS = data_offset(2, PAGE_SIZE) + PAGE_SIZE
"""What a region of two slots takes of the budget."""


LONG_S = 30.0


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have one region of two slots."""
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
    ticket = pool.request(Need(1, 2), Origin.here("use"))
    region, memory = pool.redeem(ticket)
    for slot in slots_in_doubt:
        region.slots[slot].state = "sent"
    if spoil:
        region.spoil("lost")
    del memory
    return region


def test_a_region_in_doubt_in_which_no_model_executes_is_used_again(pool: SlotPool) -> None:
    region = use(pool, 0)
    assert use(pool) is region
    assert region.state == "free"


@pytest.mark.parametrize("spoil", [False, True], ids=["in doubt", "spoiled"])
def test_a_region_that_comes_back_when_its_pool_is_closed_is_nobodys(pool: SlotPool, spoil: bool) -> None:
    region, memory = pool.redeem(pool.request(Need(1, 2), Origin.here("use")))
    region.slots[0].state = "sent"
    if spoil:
        region.spoil("lost")
    pool.close()
    del memory
    status = pool.status
    assert (status.held, status.idle, status.quarantined, status.byte_size) == (0, 0, 0, 0)


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
        ticket = pool.request(Need(1, 1, group="triton-shm"), "use")
        assert not ticket.granted.done(), "it makes no way"
        assert (SHM / region.key).exists()
        assert "0 slots are held" in str(pool.exhausted(ticket, 1))
        assert "1 more are in quarantine" in str(pool.exhausted(ticket, 1))


def test_who_waits_gets_the_region_when_the_model_has_finished(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region):
        use(pool, 0)
        ticket = pool.request(Need(1, 2), Origin.here("use"))
        assert not ticket.granted.done()
    assert ticket.granted.result(LONG_S) is region
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
        assert not (SHM / region.key).exists()


def test_a_pool_that_is_closed_lets_go_of_what_is_in_quarantine(pool: SlotPool) -> None:
    region = use(pool)
    with executing(region):
        use(pool, 0)
        assert pool.status.quarantined == 1
        pool.close()
        assert not (SHM / region.key).exists()
        assert pool.status.quarantined == 0


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
