"""What happens when all the memory that a pool may have is held: who waits, who is served, and who is told what."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.errors import PoolExhaustedError
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.pool.tickets import Ticket
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


def line_of_this_function() -> int:
    """Return the line that the caller is at."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_who_finds_the_pool_dry_waits(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    assert not ask(pool).granted.done()
    assert len(held) == pool.status.held


def test_a_ticket_that_waits_is_granted_when_a_region_comes_back(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    ticket = ask(pool)
    held.pop()
    region, memory = redeemed(pool, ticket)
    assert memory.nbytes == region.byte_size
    assert pool.status.held == 3


def test_a_region_may_come_back_in_another_thread(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    ticket = ask(pool)
    other = threading.Thread(target=held.clear)
    other.start()
    region, memory = redeemed(pool, ticket)
    other.join()
    assert memory.nbytes == region.byte_size


def test_a_ticket_for_another_group_is_granted_the_room_of_a_region_that_comes_back(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    ticket = ask(pool, group="triton-shm")
    held.pop()
    redeemed(pool, ticket)
    assert pool.status.byte_size == 3 * REGION


def test_who_came_first_is_served_first(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    tickets = [ask(pool) for _ in range(3)]
    while tickets:
        held.pop()
        tickets.pop(0).granted.result(LONG_S)
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


def test_no_idle_region_is_taken_past_those_that_wait(pool: SlotPool) -> None:
    idle = take(pool)
    held = take(pool)
    large = ask(pool, ALL_THREE)
    del idle
    assert not large.granted.done()
    assert pool.take_idle(Need(1), Origin.here("take")) is None
    assert held.nbytes
    pool.withdraw(large)


def test_those_that_had_to_wait_are_counted(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    assert pool.wait_count == 0
    ask(pool)
    ask(pool)
    held.clear()
    assert pool.wait_count == 2


def test_a_ticket_that_is_withdrawn_from_the_queue_lets_the_next_one_pass(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(2)]
    large, small = ask(pool, ALL_THREE), ask(pool)
    pool.withdraw(large)
    small.granted.result(LONG_S)
    assert not large.granted.done()
    assert len(held) == 2


def test_a_ticket_that_is_withdrawn_gives_back_the_region_that_it_was_granted(pool: SlotPool) -> None:
    take(pool)
    ticket = ask(pool)
    assert pool.status.held == 1
    pool.withdraw(ticket)
    assert (pool.status.held, pool.status.idle) == (0, 1)


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


def test_a_ticket_that_failed_may_be_withdrawn(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    ticket = ask(pool)
    pool.close()
    pool.withdraw(ticket)
    assert len(held) == 3


def test_those_that_wait_are_told_when_the_pool_is_closed(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    tickets = [ask(pool), ask(pool)]
    pool.close()
    for ticket in tickets:
        with pytest.raises(ClosedError):
            ticket.granted.result(LONG_S)
    assert len(held) == 3


def test_a_thread_that_waits_is_woken_when_the_pool_is_closed(pool: SlotPool) -> None:
    held = [take(pool) for _ in range(3)]
    ticket = ask(pool)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ticket.granted.result, LONG_S)
        pool.close()
        with pytest.raises(ClosedError):
            waiting.result()
    assert len(held) == 3


def test_the_error_of_who_waited_in_vain_names_how_many_regions_are_held_and_by_which_lines(pool: SlotPool) -> None:
    held, origins = [], []
    for _ in range(2):
        line = line_of_this_function() + 1
        origins.append(Origin.here("infer"))
    origins.append(Origin.here("prepare"))
    for origin in origins:
        held.append(redeemed(pool, ask(pool, origin=origin))[1])
    error = pool.exhausted(ask(pool), 2.5)
    assert isinstance(error, PoolExhaustedError)
    assert "within 2.5 s: 3 slots are held" in str(error)
    assert f"2 by infer at {__file__}:{line}; 1 by prepare at {__file__}:{line + 1}" in str(error)
    assert "Release results sooner, or raise PoolOptions(max_bytes=...)" in str(error)


def test_the_error_of_who_waited_in_vain_names_the_bytes(pool: SlotPool) -> None:
    held = take(pool, ALL_THREE)
    message = str(pool.exhausted(ask(pool), 1))
    assert f"no {REGION} bytes of shared memory became free" in message
    assert f"{held.nbytes} of {3 * REGION} bytes" in message


def test_a_warning_tells_which_line_holds_the_memory_when_the_pool_runs_dry(
    pool: SlotPool, caplog: pytest.LogCaptureFixture
) -> None:
    held = take(pool, ALL_THREE)
    ask(pool)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name.split(".")[0] == "shm_backend_utils"
    assert f"1 by ask at {__file__}:" in record.getMessage()
    assert held.nbytes


def test_the_warning_tells_who_held_the_memory_then_also_if_it_is_read_later(
    pool: SlotPool, caplog: pytest.LogCaptureFixture
) -> None:
    held = take(pool, ALL_THREE)
    ticket = ask(pool, origin=Origin.here("other"))
    del held
    ticket.granted.result(LONG_S)
    assert f"1 by ask at {__file__}:" in caplog.records[0].getMessage()


def test_who_need_not_wait_warns_of_nothing(pool: SlotPool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        take(pool)
    assert caplog.records == []


def test_threads_that_contend_for_few_regions_all_get_theirs_and_never_share(pool: SlotPool) -> None:
    takes, thread_count = 200, 8
    held = [take(pool) for _ in range(3)]

    def work(number: int) -> int:
        done = 0
        for round_ in range(takes):
            memory = take(pool, group=f"group {(number + round_) % 2}")
            memory[-8:] = number
            status = pool.status
            assert status.byte_size <= status.max_bytes
            assert status.held <= 3
            done += bool((memory[-8:] == number).all())
            del memory
        return done

    with concurrent.futures.ThreadPoolExecutor(thread_count) as threads:
        done = threads.map(work, range(thread_count))
        while pool.wait_count < thread_count:  # else they may follow one another, and never meet
            time.sleep(0.001)
        held.clear()
        assert list(done) == [takes] * thread_count
    assert (pool.status.held, pool.status.quarantined) == (0, 0)


def test_threads_of_different_sizes_contend_and_the_budget_holds(pool: SlotPool) -> None:
    def work(number: int) -> int:
        sizes = [1, PAGE_SIZE, 2 * PAGE_SIZE, ALL_THREE]
        for round_ in range(100):
            memory = take(pool, sizes[(number + round_) % len(sizes)])
            assert pool.status.byte_size <= pool.status.max_bytes
            del memory
        return number

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == list(range(6))
    assert pool.status.held == 0


def test_threads_that_give_up_while_others_take_leave_nothing_behind(pool: SlotPool) -> None:
    def work(number: int) -> None:
        for round_ in range(100):
            ticket = ask(pool, ALL_THREE if round_ % 3 == 0 else 1)
            if (number + round_) % 2:
                pool.withdraw(ticket)
            else:
                redeemed(pool, ticket)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    status = pool.status
    assert (status.held, status.quarantined) == (0, 0)
    pool.close()
    assert pool.status.byte_size == 0
