"""Idle regions: how long they stay; and who takes one without the lock has it, whatever is done to the idle ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.pool.inventory import Inventory, Kind
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE

SHM = Path("/dev/shm")
KIND: Kind = (1, PAGE_SIZE, "direct")
OTHER: Kind = (1, PAGE_SIZE, "forward")


@pytest.fixture
def inventory() -> Iterator[Inventory]:
    """One that is full with two idle regions."""
    first, second = (SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE) for _ in range(2))
    inventory = Inventory(first.byte_size + second.byte_size)
    with contextlib.ExitStack() as at_end:
        at_end.callback(inventory.destroy_all)
        for region in (first, second):
            promise = inventory.promise(region.byte_size, KIND)
            assert promise is not None
            assert promise.evicted == []
            inventory.add(region, KIND, promise)
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
    assert inventory.promise(inventory.max_bytes, OTHER) is None
    assert is_there(taken)
    assert not is_there(other), "it had made room before that was seen"
    assert inventory.byte_size == taken.byte_size


def test_of_another_kind_the_region_goes_that_was_idle_the_longest(inventory: Inventory) -> None:
    first, second = inventory.idle
    first.idle_since, second.idle_since = 20.0, 10.0
    promise = inventory.promise(first.byte_size, OTHER)
    assert promise is not None
    assert promise.evicted == [second]
    assert inventory.byte_size == inventory.max_bytes
    for _ in range(2):
        inventory.unpromise(promise)
        assert (is_there(first), is_there(second)) == (True, False)
        assert inventory.byte_size == first.byte_size


def test_what_has_no_room_even_without_the_idle_ones_leaves_them_alone(inventory: Inventory) -> None:
    idle = inventory.idle
    assert inventory.promise(inventory.max_bytes + 1, KIND) is None
    assert [is_there(region) for region in idle] == [True, True]
    assert inventory.take(1, KIND) is not None
