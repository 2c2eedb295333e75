"""Memory that no call can have now: all of it is held, or a model may still be at work in it. Calls wait in order."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.client.errors import PoolExhaustedError
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.pool.inventory import Kind, Need, Waiter
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.process import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset, record_offset
from tests.unit.taken_regions import REGION, SHM, Memory, is_there, take

ALL_THREE = 3 * REGION - data_offset(1, PAGE_SIZE)
NEED = Need(1)
LONG_S = 30.0


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        yield pool


@pytest.fixture
def _no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the housekeeper do nothing unless it is hurried: a wake-up that is lost stays lost."""
    monkeypatch.setattr(SlotPool, "_pause_s", lambda _: 1e6)


def ask(pool: SlotPool, byte_size: int = 1, holder: object = "ask") -> Waiter:
    return pool.request(Need(byte_size), holder)


def granted(pool: SlotPool, waiter: Waiter) -> tuple[SlotRegion, Memory]:
    waiter.granted.result(LONG_S)
    return pool.take_granted(waiter)


def taken(pool: SlotPool, need: Need = NEED, holder: object = "taker") -> Memory:
    idle = pool.take_idle(need, holder)
    if idle is not None:
        return idle[1]
    return granted(pool, pool.request(need, holder))[1]


@pytest.mark.usefixtures("_no_rounds")
def test_waiters_are_granted_in_order_when_regions_are_given_back_and_counted(pool: SlotPool) -> None:
    held = [taken(pool) for _ in range(3)]
    assert pool.wait_count == 0
    first, second, third = (ask(pool) for _ in range(3))
    assert not first.granted.done()
    held.pop()
    region, memory = granted(pool, first)
    assert memory.nbytes == region.byte_size
    assert (second.granted.done(), third.granted.done()) == (False, False)
    assert (pool.status.held, pool.wait_count) == (3, 3)
    held.pop()
    second.granted.result(LONG_S)
    assert not third.granted.done()


def test_a_waiter_that_its_owner_cancelled_is_passed_over(pool: SlotPool) -> None:
    held = [taken(pool) for _ in range(3)]
    cancelled, next_one = ask(pool), ask(pool)
    assert cancelled.granted.cancel()
    held.pop()
    next_one.granted.result(LONG_S)
    assert pool.status.held == 3


def test_a_small_call_does_not_overtake_a_large_one_that_waits(pool: SlotPool) -> None:
    held = taken(pool)
    large = ask(pool, ALL_THREE)
    small = ask(pool)
    assert (large.granted.done(), small.granted.done()) == (False, False)
    del held
    large_region, memory = granted(pool, large)
    assert not small.granted.done()
    del memory
    assert granted(pool, small)[0] is large_region


def test_a_waiter_that_is_withdrawn_lets_the_next_one_pass(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "_keep_house", lambda _: None)  # which would do it too, later
    held = [taken(pool) for _ in range(2)]
    large, small = ask(pool, ALL_THREE), ask(pool)
    pool.withdraw(large)
    small.granted.result(LONG_S)
    assert (large.granted.done(), len(held)) == (False, 2)


def test_a_waiter_that_has_its_region_gets_no_other(pool: SlotPool) -> None:
    waiter = ask(pool)
    memory = granted(pool, waiter)[1]
    with pytest.raises(ClosedError):
        pool.take_granted(waiter)
    assert (pool.status.held, pool.status.byte_size) == (1, memory.nbytes)


def test_the_error_of_who_waited_in_vain_names_how_many_regions_are_held_and_by_which_lines(pool: SlotPool) -> None:
    origins = [*(Origin.here("infer") for _ in range(2)), Origin.here("prepare")]
    held = [granted(pool, ask(pool, holder=origin))[1] for origin in origins]
    error = pool.exhausted(ask(pool), 2.5)
    assert isinstance(error, PoolExhaustedError)
    line = rf"{re.escape(__file__)}:\d+"
    assert re.search(rf"within 2.5 s: 3 slots are held.*2 by infer at {line}; 1 by prepare at {line}", str(error))
    assert "Release results sooner, or raise PoolOptions(max_bytes=...)" in str(error)
    assert f"no {REGION} bytes of shared memory became free" in str(error)
    assert f"{len(held) * REGION} of {3 * REGION} bytes" in str(error)


def test_taking_and_giving_back_wait_for_no_lock() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        taken(pool)
        is_locked, is_over = threading.Event(), threading.Event()

        def hold_the_lock() -> None:
            with pool._lock:
                is_locked.set()
                is_over.wait(LONG_S)

        holder = threading.Thread(target=hold_the_lock)
        holder.start()
        assert is_locked.wait(LONG_S)
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as thread:  # one that hangs shall not hang the test
                for _ in range(3):
                    assert thread.submit(lambda: pool.take_idle(NEED, "taker") is not None).result(5)
        finally:
            is_over.set()
            holder.join()


def test_one_that_comes_back_while_somebody_waits_and_the_lock_is_taken_is_granted_after_it() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        held = [taken(pool)]
        waiter = pool.request(NEED, "waiter")
        with pool._lock:
            held.clear()
            assert not waiter.granted.done()
        waiter.granted.result(LONG_S)


@pytest.mark.usefixtures("_no_rounds")
def test_one_that_comes_back_while_another_is_added_is_granted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
        held = [taken(pool)]
        first, waiting = pool.request(NEED, "taker"), pool.request(NEED, "waiter")
        add = pool._inventory.add

        def add_late(*arguments: Any) -> None:
            held.clear()
            add(*arguments)

        monkeypatch.setattr(pool._inventory, "add", add_late)
        memory = pool.take_granted(first)[1]
        assert memory.nbytes
        waiting.granted.result(LONG_S)


@pytest.mark.usefixtures("switching_often", "_no_rounds")
@pytest.mark.parametrize("budget", [1, 3])
def test_no_wake_up_is_lost_and_no_region_is_had_by_two(budget: int) -> None:
    thread_count, rounds = 8, 300
    all_ready = threading.Barrier(thread_count)

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget * REGION))) as pool:

        def work(number: int) -> int:
            all_ready.wait(LONG_S)
            done = 0
            for _ in range(rounds):
                memory = taken(pool, holder=number)
                memory[-8:] = number
                time.sleep(0)  # on a busy machine, nothing less has another thread come while this one has it
                done += bool((memory[-8:] == number).all())
                del memory
            return done

        with concurrent.futures.ThreadPoolExecutor(thread_count) as threads:
            assert list(threads.map(work, range(thread_count))) == [rounds] * thread_count
        assert pool.status.held == 0
        assert pool.wait_count > 0
        waited = pool.wait_count
        held = [taken(pool) for _ in range(budget)]  # no region is lost, and none of the budget
        assert (pool.status.held, pool.status.idle, pool.wait_count, len(held)) == (budget, 0, waited, budget)


KIND: Kind = Need(1)[1:]


@pytest.fixture
def pair() -> Iterator[SlotPool]:
    """A pool of one region, which has two slots."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=TWO_SLOTS))) as pool:
        yield pool


TWO_SLOTS = data_offset(2, PAGE_SIZE) + PAGE_SIZE
"""What a region of two slots takes of the budget."""


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


def use(pair: SlotPool, *slots_in_doubt: int, spoil: bool = False) -> SlotRegion:
    region, memory = take(pair, slot_count=2)
    for slot in slots_in_doubt:
        region.slots[slot].state = "sent"
    if spoil:
        region.spoil("lost")
    del memory
    return region


def test_requests_that_are_still_on_their_way_become_stale_before_the_region_is_used_again(pair: SlotPool) -> None:
    region = use(pair)
    generations = [slot.record.generation for slot in region.slots]
    assert use(pair, 1) is use(pair) is region
    assert [slot.record.generation for slot in region.slots] == [generations[0], generations[1] + 1]
    assert region.slots[1].generation == region.slots[1].record.generation


def test_a_region_in_doubt_in_which_a_model_executes_waits_in_quarantine(pair: SlotPool) -> None:
    region = use(pair)
    with executing(region, slot=1):
        assert use(pair, 0, 1) is region
        status = pair.status
        assert (status.held, status.idle, status.quarantined, status.byte_size) == (0, 0, 1, TWO_SLOTS)
        assert [slot.state for slot in region.slots] == ["free", "sent"]
        assert pair.take_idle(Need(1, 2), "use") is None
        first = pair.request(Need(1, 2), "use")
        assert not first.granted.done(), "nobody gets it"
        waiter = pair.request(Need(1, 1, group="triton-shm"), "use")
        assert not waiter.granted.done(), "it makes no way"
        assert is_there(region)
        assert "0 slots are held" in str(pair.exhausted(waiter, 1))
        assert "1 more are in quarantine" in str(pair.exhausted(waiter, 1))
    assert first.granted.result(LONG_S) is region, "the model has finished"
    assert pair.status.quarantined == 0


def test_a_spoiled_region_is_destroyed_although_a_model_executes_in_it(pair: SlotPool) -> None:
    region = use(pair)
    with executing(region):
        assert use(pair, 0, spoil=True) is region
        assert (pair.status.quarantined, pair.status.byte_size) == (0, 0)
        assert not is_there(region)


def test_a_region_that_an_interrupt_left_in_nobodys_hands_is_destroyed_after_seconds(pool: SlotPool) -> None:
    taken, inventory = [take(pool) for _ in range(2)], pool._inventory
    taken.clear()
    lost, found_again = (inventory.take(1, KIND) for _ in range(2))
    assert lost is not None
    assert found_again is not None
    inventory.destroy_lost([lost, found_again])
    assert inventory.lost_since == {}, "those who hold them are known"
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
    inventory.returned.append(found_again)
    inventory.destroy_lost([])
    assert inventory.lost_since == {}
    inventory.sort_returned()
