"""Slots in which a model may still be at work: they wait until it is certain that none is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.client.origin import Origin
from shm_backend_utils.client.pool import SlotPool
from shm_backend_utils.client.pool_options import PoolOptions
from shm_backend_utils.client.slot import Slot
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.protocol.region_layout import PAGE_SIZE, data_offset

SHM = Path("/dev/shm")
SLOT = data_offset(2) + PAGE_SIZE
"""What a slot of two turns takes of the budget."""
LONG_S = 30.0


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have one slot of two turns."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=SLOT))) as pool:
        yield pool


@contextlib.contextmanager
def executing(slot: Slot, turn: int = 0) -> Iterator[None]:
    """Hold the lease of a slot as a model does, through a description of its own."""
    fd = os.open(SHM / slot.key, os.O_RDWR)
    try:
        lease = SlotLease(fd, turn)
        assert lease.take()
        yield
        lease.give_back()
    finally:
        os.close(fd)


def use(pool: SlotPool, *turns_in_doubt: int, spoil: bool = False) -> Slot:
    """Take a slot and give it back, with some of its turns in doubt."""
    ticket = pool.request(1, 2, "direct", Origin("use"))
    slot, memory = pool.redeem(ticket)
    for turn in turns_in_doubt:
        slot.turns[turn].is_in_doubt = True
    slot.is_spoiled = spoil
    del memory
    return slot


def test_a_slot_in_doubt_in_which_no_model_executes_is_used_again(pool: SlotPool) -> None:
    slot = use(pool, 0)
    assert use(pool) is slot
    assert not slot.is_in_doubt


def test_requests_that_are_still_on_their_way_become_stale_before_the_slot_is_used_again(pool: SlotPool) -> None:
    slot = use(pool, 1)
    generations = [turn.record.generation for turn in slot.turns]
    use(pool)
    assert [turn.record.generation for turn in slot.turns] == [generations[0], generations[1] + 1]
    assert slot.turns[1].generation == slot.turns[1].record.generation


def test_a_slot_in_doubt_in_which_a_model_executes_waits_in_quarantine(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        assert use(pool, 0) is slot
        status = pool.status
        assert (status.held, status.idle, status.quarantined, status.byte_size) == (0, 0, 1, SLOT)


def test_nobody_gets_a_slot_in_quarantine(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
        assert pool.take_idle(1, 2, "direct", Origin("use")) is None
        assert not pool.request(1, 2, "direct", Origin("use")).granted.done()


def test_a_slot_in_quarantine_never_makes_way(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
        ticket = pool.request(1, 1, "triton-shm", Origin("use"))
        assert not ticket.granted.done()
        assert (SHM / slot.key).exists()
        pool.withdraw(ticket)


def test_who_waits_gets_the_slot_when_the_model_has_finished(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
        ticket = pool.request(1, 2, "direct", Origin("use"))
        assert not ticket.granted.done()
    assert ticket.granted.result(LONG_S).slot is slot
    assert pool.status.quarantined == 0


def test_a_slot_returns_from_quarantine_by_the_next_call(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
    assert use(pool) is slot


def test_one_turn_in_which_a_model_executes_keeps_the_whole_slot_in_quarantine(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot, turn=1):
        use(pool, 0, 1)
        assert pool.status.quarantined == 1
        assert [turn.is_in_doubt for turn in slot.turns] == [False, True]


def test_the_message_of_a_dry_pool_counts_what_is_in_quarantine(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
        ticket = pool.request(1, 2, "direct", Origin("use"))
        assert "0 slots are held" in str(pool.exhausted(ticket, 1))
        assert "1 more are in quarantine" in str(pool.exhausted(ticket, 1))


def test_a_spoiled_slot_is_destroyed_although_a_model_executes_in_it(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        assert use(pool, 0, spoil=True) is slot
        assert (pool.status.quarantined, pool.status.byte_size) == (0, 0)
        assert not (SHM / slot.key).exists()


def test_a_pool_that_is_closed_lets_go_of_what_is_in_quarantine(pool: SlotPool) -> None:
    slot = use(pool)
    with executing(slot):
        use(pool, 0)
        assert pool.status.quarantined == 1
        pool.close()
        assert not (SHM / slot.key).exists()
        assert pool.status.quarantined == 0
