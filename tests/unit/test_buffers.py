"""Memory beside a slot's region: it is nobody else's before the slot's own request is over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.errors import BudgetError, ClosedError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.opened import open_region

NEED = Need(PAGE_SIZE, 2)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**16))) as pool:
        yield pool


def test_what_a_request_uses_beside_its_slot_is_kept_until_the_slot_is_free(pool: SlotPool) -> None:
    region, memory = pool.redeem(pool.request(NEED, "a test"))
    kept = [weakref.ref(beside := np.empty(8))]
    region.slots[0].kept = (beside,)
    region.slots[0].begin(b"")
    model = open_region(region.key, region.token, "region")
    assert model.lease(0).take()
    del beside, memory
    assert (pool.status.held, pool.status.quarantined, kept[0]() is None) == (0, 1, False)
    model.lease(0).give_back()
    model.close()
    assert (pool.status.quarantined, pool.status.idle, kept[0]() is None) == (0, 1, True)


def test_it_goes_with_the_pool(pool: SlotPool) -> None:
    region, memory = pool.redeem(pool.request(NEED, "a test"))
    kept = weakref.ref(beside := np.empty(8))
    region.slots[0].kept = (beside,)
    region.slots[0].begin(b"")
    del beside, memory
    pool.close()
    assert kept() is None


# Regions that grow


@pytest.mark.parametrize("kind", RegionKind)
def test_a_region_grows_with_what_lies_there(pool: SlotPool, kind: RegionKind) -> None:
    region, memory = pool.redeem(pool.request(Need(PAGE_SIZE, kind=kind), "a test"))
    memory[region.data_offset :] = 7
    before, slot = (region.key, region.token, region.data_end), region.slots[0]
    generation = slot.begin(b"")
    model = open_region(*before[:2], "region")
    assert pool.grow(region, region.data_end + 5 * PAGE_SIZE)
    assert (region.key, region.data_end) == (before[0], before[2] + 5 * PAGE_SIZE)
    assert region.token != before[1]
    assert pool.status.byte_size == region.byte_size == region.data_end
    with pytest.raises((RegionRefusedError, RegionGoneError), match="token"):
        open_region(*before[:2], "region")
    with contextlib.closing(open_region(region.key, region.token, "region")) as again:
        assert again.header.byte_size == region.byte_size
        again.bytes()[before[2]] = 9
        assert (memory[-1], region.buffer[before[2] - 1], region.buffer[before[2]]) == (7, 7, 9)
        assert again.record(0).generation == model.record(0).generation == slot.record.generation == generation
    model.record(0).complete(generation, b"")
    model.close()
    assert slot.is_completed
    slot.become_free("answer")
    del memory
    found = pool.take_idle(Need(5 * PAGE_SIZE, kind=kind), "another")
    assert found is not None
    assert found[0] is region


def test_a_region_grows_at_once_or_not_at_all(pool: SlotPool) -> None:
    region, memory = pool.redeem(pool.request(Need(PAGE_SIZE), "a test"))
    token = region.token
    assert not pool.grow(region, 2**16 + PAGE_SIZE)
    assert pool.grow(region, region.data_end)
    _, other = pool.redeem(pool.request(Need(2**15), "another"))
    assert not pool.grow(region, region.data_end + 2**15)
    assert (region.token, memory.nbytes) == (token, region.byte_size)
    del other
    assert pool.grow(region, region.data_end + 2**15)
    pool.close()
    with pytest.raises(ClosedError):
        pool.grow(region, region.data_end + PAGE_SIZE)


def test_a_region_that_others_share_does_not_grow(pool: SlotPool) -> None:
    region, memory = pool.redeem(pool.request(NEED, "a test"))
    assert not pool.grow(region, region.data_end + 1)
    del memory


# Regions at once, or not at all


def test_a_region_is_there_at_once_while_there_is_room(pool: SlotPool) -> None:
    ticket = pool.request_at_once(Need(2**14), "a test")
    assert ticket is not None
    region, memory = pool.redeem(ticket)
    assert memory.nbytes == region.byte_size
    del memory


def test_who_cannot_have_one_at_once_is_in_nobodys_way(pool: SlotPool, caplog: pytest.LogCaptureFixture) -> None:
    _, memory = pool.redeem(pool.request(Need(2**15), "a test"))
    assert pool.request_at_once(Need(2**15), "another") is None
    assert (pool.wait_count, caplog.records) == (0, [])
    assert pool.take_idle(NEED, "a third") is None  # which asks no queue if somebody waits
    ticket = pool.request(NEED, "a third")
    assert ticket.granted.done()
    pool.withdraw(ticket)
    del memory
    assert pool.request_at_once(Need(2**15), "another") is not None


def test_what_never_can_be_is_an_error_as_ever(pool: SlotPool) -> None:
    with pytest.raises(BudgetError):
        pool.request_at_once(Need(2**17), "a test")
    pool.close()
    with pytest.raises(ClosedError):
        pool.request_at_once(NEED, "a test")
