"""Taking and giving back wait for no lock, and no wake-up is lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
LONG_S = 30.0
NEED = Need(1)

Memory = npt.NDArray[np.uint8]


@pytest.fixture
def _no_housekeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody serve those that wait but those that take and give back: a wake-up that is lost stays lost."""
    monkeypatch.setattr(SlotPool, "_keep_house", lambda _: 1e6)


@pytest.fixture
def switching() -> Iterator[None]:
    """Have threads give way to each other at nearly every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def take(pool: SlotPool, need: Need = NEED, holder: object = "taker") -> Memory:
    """Take a region as a call does, and wait for it."""
    taken = pool.take_idle(need, holder)
    if taken is None:
        ticket = pool.request(need, holder)
        ticket.granted.result(LONG_S)
        taken = pool.redeem(ticket)
    return taken[1]


def test_taking_and_giving_back_wait_for_no_lock() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        take(pool)
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


@pytest.mark.usefixtures("_no_housekeeper")
def test_who_waits_is_served_by_the_one_who_gives_back() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        held = [take(pool)]
        ticket = pool.request(NEED, "waiter")
        held.clear()
        assert ticket.granted.done()


def test_one_that_comes_back_while_somebody_waits_and_the_lock_is_taken_is_granted_after_it() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=REGION))) as pool:
        held = [take(pool)]
        ticket = pool.request(NEED, "waiter")
        with pool._lock:
            held.clear()
            assert not ticket.granted.done()
        pool.status  # noqa: B018  # whoever has the lock next looks
        assert ticket.granted.done()


@pytest.mark.usefixtures("_no_housekeeper")
def test_one_that_comes_back_while_another_is_added_is_granted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
        held = [take(pool)]
        promised, waiting = pool.request(NEED, "taker"), pool.request(NEED, "waiter")
        add = pool._inventory.add

        def add_late(*arguments: Any) -> None:
            held.clear()
            add(*arguments)

        monkeypatch.setattr(pool._inventory, "add", add_late)
        memory = pool.redeem(promised)[1]
        assert memory.nbytes
        assert waiting.granted.done()


@pytest.mark.usefixtures("switching", "_no_housekeeper")
@pytest.mark.parametrize("budget", [1, 3], ids=["one region", "three regions"])
def test_no_wake_up_is_lost_and_no_region_is_had_by_two(budget: int) -> None:
    thread_count, rounds = 8, 1000
    all_ready = threading.Barrier(thread_count)

    with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget * REGION))) as pool:

        def work(number: int) -> int:
            all_ready.wait(LONG_S)
            done = 0
            for _ in range(rounds):
                memory = take(pool, holder=number)
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
        held = [take(pool) for _ in range(budget)]  # no region is lost, and none of the budget
        assert (pool.status.held, pool.status.idle, pool.wait_count, len(held)) == (budget, 0, waited, budget)


@pytest.mark.usefixtures("switching", "_no_housekeeper")
def test_kinds_and_sizes_that_displace_each_other_all_get_theirs() -> None:
    needs = [Need(1), Need(2 * PAGE_SIZE), Need(1, 2), Need(1, group="triton-shm")]
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * REGION))) as pool:

        def work(number: int) -> int:
            for round_ in range(100):
                need = needs[(number + round_) % len(needs)]
                memory = take(pool, need, number)
                memory[-8:] = number
                assert (memory[-8:] == number).all()
                del memory
                assert pool.status.byte_size <= pool.status.max_bytes
            return number

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == list(range(8))
        assert (pool.status.held, pool.status.quarantined) == (0, 0)
