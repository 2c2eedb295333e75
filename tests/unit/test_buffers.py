"""Memory beside a slot's region: it is nobody else's before the slot's own request is over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.client.paths.call import RegionBuffer
from shm_backend_utils.errors import BudgetError, ClosedError
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.opened import open_region

NEED = Need(PAGE_SIZE, 2)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**16))) as pool:
        yield pool


def take_both(pool: SlotPool) -> tuple[SlotRegion, SlotRegion, list[Any]]:
    """Take two regions, and send a request that uses one beside the other; return what keeps them, too."""
    (own, memory), (overflow, beside) = (pool.redeem(pool.request(NEED, "a test")) for _ in range(2))
    own.slots[0].kept = (RegionBuffer(overflow, beside),)
    own.slots[0].begin(b"")
    own.slots[1].kept = own.slots[:1]  # as where an interrupt came before the request
    return own, overflow, [memory, beside]


@pytest.mark.parametrize(("is_beside", "is_spoiled"), [(False, False), (True, False), (False, True)])
def test_an_overflow_waits_while_a_model_is_at_work(pool: SlotPool, is_beside: bool, is_spoiled: bool) -> None:
    own, overflow, memories = take_both(pool)
    region = overflow if is_beside else own
    model = open_region(region.key, region.token, "region")
    assert model.lease(0).take()
    if is_spoiled:
        own.spoil("refusal")
    memories.clear()
    assert (pool.status.held, pool.status.quarantined) == (1, 1)
    model.lease(0).give_back()
    model.close()
    assert (pool.status.held, pool.status.quarantined, pool.status.idle) == (0, 0, 1 if is_spoiled else 2)


def test_an_overflow_comes_back_when_its_request_is_stale(pool: SlotPool) -> None:
    own, overflow, memories = take_both(pool)
    memories.clear()
    assert (pool.status.held, pool.status.quarantined, pool.status.idle) == (0, 0, 2)
    assert (own.state, overflow.state, own.slots[0].kept) == ("free", "free", ())
    assert own.slots[0].record.generation == 2


def test_an_overflow_goes_with_the_pool(pool: SlotPool) -> None:
    _, _, memories = take_both(pool)
    kept = weakref.ref(memories.pop())
    pool.close()
    assert kept() is None
    assert pool.status.held == 0


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
