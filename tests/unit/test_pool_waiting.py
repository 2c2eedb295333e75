"""When all the memory that a pool may have is held: who waits, who is served, who gives up, and what they are told.

Taking and giving back wait for no lock, and no wake-up is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.core import ClientMemory
from shm_backend_utils.client.errors import PoolExhaustedError
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.paths import taking
from shm_backend_utils.client.paths.taking import take as take_region
from shm_backend_utils.client.settings import CallSettings
from shm_backend_utils.client.steps import AsyncioDriver
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.pool.need import Need, Ticket
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
"""What the smallest region takes of the budget."""


ALL_THREE = 3 * REGION - data_offset(1, PAGE_SIZE)
"""Bytes of data for which a region takes the whole budget."""


LONG_S = 30.0
"""Longer than anything here takes unless it hangs."""


Memory = npt.NDArray[np.uint8]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that may have three of the smallest regions."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=3 * REGION))) as pool:
        yield pool


def ask(pool: SlotPool, byte_size: int = 1, group: str = "direct", origin: Origin | None = None) -> Ticket:
    return pool.request(Need(byte_size, 1, group=group), origin or Origin.here("ask"))


def redeemed(pool: SlotPool, ticket: Ticket) -> tuple[SlotRegion, Memory]:
    """Wait until the ticket is granted, and return its region."""
    ticket.granted.result(LONG_S)
    return pool.redeem(ticket)


def take(pool: SlotPool, byte_size: int = 1, group: str = "direct") -> Memory:
    """Take a region and return its memory; while it lives, the region is held."""
    return redeemed(pool, ask(pool, byte_size, group))[1]


@pytest.mark.usefixtures("_no_rounds")
def test_a_ticket_that_waits_is_granted_when_a_region_is_given_back_and_counted(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    assert pool.wait_count == 0
    ticket = ask(pool)
    assert not ticket.granted.done()
    held.pop()
    region, memory = redeemed(pool, ticket)
    assert memory.nbytes == region.byte_size
    assert (pool.status.held, pool.wait_count) == (3, 1)


def test_who_came_first_is_served_first(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    tickets = [ask(pool) for _ in range(3)]
    while tickets:
        held.pop()
        first = tickets.pop(0)
        first.granted.result(LONG_S)
        assert not any(ticket.granted.done() for ticket in tickets)


def test_a_small_call_does_not_overtake_a_large_one_that_waits(pool: SlotPool) -> None:
    held = take(pool)
    large = ask(pool, ALL_THREE)
    small = ask(pool)
    assert (large.granted.done(), small.granted.done()) == (False, False)
    del held
    large_region, memory = redeemed(pool, large)
    assert not small.granted.done()
    del memory
    assert redeemed(pool, small)[0] is large_region


def test_a_ticket_that_is_withdrawn_from_the_queue_lets_the_next_one_pass(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(2)]
    large, small = ask(pool, ALL_THREE), ask(pool)
    pool.withdraw(large)
    small.granted.result(LONG_S)
    assert not large.granted.done()
    assert len(held) == 2


def test_a_ticket_that_is_withdrawn_gives_back_the_room_that_it_was_granted(pool: SlotPool) -> None:
    ticket = ask(pool, ALL_THREE)
    waiting = ask(pool, ALL_THREE)
    assert not waiting.granted.done()
    pool.withdraw(ticket)
    waiting.granted.result(LONG_S)
    assert pool.status.byte_size == 3 * REGION


def test_regions_that_made_way_for_a_ticket_that_is_withdrawn_are_gone(pool: SlotPool) -> None:
    region = redeemed(pool, ask(pool))[0]
    ticket = ask(pool, ALL_THREE)
    assert ticket.granted.done()
    pool.withdraw(ticket)
    assert not (Path("/dev/shm") / region.key).exists()
    assert pool.status.byte_size == 0


def test_a_ticket_that_its_owner_cancelled_is_passed_over(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    cancelled, next_one = ask(pool), ask(pool)
    assert cancelled.granted.cancel()
    held.pop()
    next_one.granted.result(LONG_S)
    assert pool.status.held == 3


def test_a_ticket_that_was_redeemed_cannot_be_redeemed_again(pool: SlotPool) -> None:
    ticket = ask(pool)
    memory = redeemed(pool, ticket)[1]
    with pytest.raises(ClosedError):
        pool.redeem(ticket)
    assert (pool.status.held, pool.status.byte_size) == (1, memory.nbytes)


def test_those_that_wait_are_told_when_the_pool_is_closed(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    tickets = [ask(pool), ask(pool)]
    pool.close()
    for ticket in tickets:
        with pytest.raises(ClosedError):
            ticket.granted.result(LONG_S)
        pool.withdraw(ticket)
    assert len(held) == 3


def test_the_error_of_who_waited_in_vain_names_how_many_regions_are_held_and_by_which_lines(pool: SlotPool) -> None:
    origins = [*(Origin.here("infer") for _ in range(2)), Origin.here("prepare")]
    held = [redeemed(pool, ask(pool, origin=origin))[1] for origin in origins]
    error = pool.exhausted(ask(pool), 2.5)
    assert isinstance(error, PoolExhaustedError)
    line = rf"{re.escape(__file__)}:\d+"
    assert re.search(rf"within 2.5 s: 3 slots are held.*2 by infer at {line}; 1 by prepare at {line}", str(error))
    assert "Release results sooner, or raise PoolOptions(max_bytes=...)" in str(error)
    assert f"no {REGION} bytes of shared memory became free" in str(error)
    assert f"{len(held) * REGION} of {3 * REGION} bytes" in str(error)


def test_a_warning_tells_which_line_holds_the_memory_when_the_pool_runs_dry(
    pool: SlotPool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        take(pool)
    assert caplog.records == [], "nobody had to wait"
    held = take(pool, ALL_THREE)
    ticket = ask(pool, origin=Origin.here("other"))
    del held
    ticket.granted.result(LONG_S)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name.split(".")[0] == "shm_backend_utils"
    assert f"1 by ask at {__file__}:" in record.getMessage(), "who held it then, also if it is read later"


NEED = Need(1)


@pytest.fixture
def _no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the housekeeper do nothing unless it is hurried: a wake-up that is lost stays lost."""
    monkeypatch.setattr(SlotPool, "_patience", lambda _: 1e6)


def taken(pool: SlotPool, need: Need = NEED, holder: object = "taker") -> Memory:
    """Take a region as a call does, and wait for it."""
    idle = pool.take_idle(need, holder)
    if idle is not None:
        return idle[1]
    ticket = pool.request(need, holder)
    ticket.granted.result(LONG_S)
    return pool.redeem(ticket)[1]


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
        ticket = pool.request(NEED, "waiter")
        with pool._lock:
            held.clear()
            assert not ticket.granted.done()
        ticket.granted.result(LONG_S)


@pytest.mark.usefixtures("_no_rounds")
def test_one_that_comes_back_while_another_is_added_is_granted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2 * REGION))) as pool:
        held = [taken(pool)]
        promised, waiting = pool.request(NEED, "taker"), pool.request(NEED, "waiter")
        add = pool._inventory.add

        def add_late(*arguments: Any) -> None:
            held.clear()
            add(*arguments)

        monkeypatch.setattr(pool._inventory, "add", add_late)
        memory = pool.redeem(promised)[1]
        assert memory.nbytes
        waiting.granted.result(LONG_S)


@pytest.mark.usefixtures("switching_often", "_no_rounds")
@pytest.mark.parametrize("budget", [1, 3], ids=["one region", "three regions"])
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


@pytest.mark.usefixtures("switching_often", "_no_rounds")
def test_kinds_and_sizes_that_displace_each_other_all_get_theirs() -> None:
    needs = [Need(1), Need(2 * PAGE_SIZE), Need(1, 2), Need(1, group="triton-shm")]
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * REGION))) as pool:

        def work(number: int) -> int:
            for round_ in range(100):
                need = needs[(number + round_) % len(needs)]
                memory = taken(pool, need, number)
                memory[-8:] = number
                assert (memory[-8:] == number).all()
                del memory
                assert pool.status.byte_size <= pool.status.max_bytes
            return number

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == list(range(8))
        assert (pool.status.held, pool.status.quarantined) == (0, 0)


MODEL = KnownModel(ModelSpec.from_config({"name": "m"}), head_room=1)


class Take:
    """Takes a region as a call does, and makes it in the only thread that there is."""

    def __init__(self, memory: ClientMemory) -> None:
        self._pool = memory.pool
        self._driver = AsyncioDriver(cast(Any, None))
        self.threads = self._driver._threads = concurrent.futures.ThreadPoolExecutor(1)

    def __call__(self) -> Awaitable[object]:
        settings = CallSettings("m", "", "auto", time.monotonic() + LONG_S, RequestOptions(), Origin.here("infer"))
        return self._driver.run(take_region(self._pool, settings, MODEL, MODEL.data_begin + 1, 1, "direct"))


def with_one_region(work: Callable[[SlotPool, Take], Awaitable[None]]) -> None:
    """Do work with a pool that may have one region."""

    async def main() -> None:
        memory = ClientMemory(PoolOptions(max_bytes=REGION), CudaAccess())
        take = Take(memory)
        with contextlib.closing(memory.pool), take.threads:
            await work(memory.pool, take)

    asyncio.run(main())


async def cancelled(task: asyncio.Task[object]) -> None:
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def nothing_is_held(pool: SlotPool) -> None:
    while pool.status.held:  # the thread that made it has it for a moment longer
        await asyncio.sleep(0.001)


def test_a_task_that_is_cancelled_while_it_waits_takes_nothing() -> None:
    async def work(pool: SlotPool, take: Take) -> None:
        held = await take()
        await cancelled(asyncio.ensure_future(take()))
        assert pool.status.held == 1
        del held
        await nothing_is_held(pool)
        assert await take()

    with_one_region(work)


def test_a_task_that_is_cancelled_while_its_memory_is_made_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    make = SlotRegion.__init__

    def make_slowly(self: SlotRegion, *arguments: Any) -> None:
        begun.set()
        go.wait(LONG_S)
        make(self, *arguments)

    monkeypatch.setattr(SlotRegion, "__init__", make_slowly)
    monkeypatch.setattr(taking, "LONG_COPY", 0)

    async def work(pool: SlotPool, take: Take) -> None:
        task = asyncio.ensure_future(take())
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, LONG_S)
        await cancelled(task)
        assert pool.status.byte_size == REGION
        go.set()
        assert await take()
        await nothing_is_held(pool)
        assert pool.status.byte_size == REGION

    with_one_region(work)


def test_a_task_that_is_cancelled_before_its_memory_is_made_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "LONG_COPY", 0)

    async def work(pool: SlotPool, take: Take) -> None:
        go = threading.Event()
        before = take.threads.submit(go.wait, LONG_S)
        await cancelled(asyncio.ensure_future(take()))
        go.set()
        before.result()
        assert pool.status.byte_size == 0
        assert await take()

    with_one_region(work)
