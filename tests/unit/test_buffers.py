"""Memory beside a slot's region: it is nobody else's before the slot's own request is over."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.paths import taking
from shm_backend_utils.client.paths.call import LONG_COPY
from shm_backend_utils.errors import BudgetError, ClosedError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory import shared_file
from shm_backend_utils.memory.managed import RegionKind
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.opened import open_region

NEED = Need(PAGE_SIZE, 2)
LONG_S = 20.0
SOON_S = 0.1


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**16))) as pool:
        yield pool


@pytest.mark.parametrize("goes_with_the_pool", [False, True])
def test_memory_beside_a_slot_is_kept_until_the_slot_is_free(pool: SlotPool, goes_with_the_pool: bool) -> None:
    region, memory = pool.take_granted(pool.request(NEED, "a test"))
    kept = weakref.ref(beside := np.empty(8))
    region.slots[0].kept = (beside,)
    region.slots[0].begin(b"")
    with contextlib.closing(open_region(region.key, region.token, "region")) as model:
        assert model.lease(0).take()
        del beside, memory
        assert (pool.status.held, pool.status.quarantined, kept() is None) == (0, 1, False)
        if goes_with_the_pool:
            pool.close()
    assert (pool.status.quarantined, pool.status.idle, kept() is None) == (0, not goes_with_the_pool, True)


@pytest.mark.parametrize("kind", RegionKind)
def test_a_region_grows_with_what_lies_there(pool: SlotPool, kind: RegionKind) -> None:
    region, memory = pool.take_granted(pool.request(Need(PAGE_SIZE, kind=kind), "a test"))
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
    region, memory = pool.take_granted(pool.request(Need(PAGE_SIZE), "a test"))
    token = region.token
    assert not pool.grow(region, 2**16 + PAGE_SIZE)
    assert pool.grow(region, region.data_end)
    _, other = pool.take_granted(pool.request(Need(2**15), "another"))
    assert not pool.grow(region, region.data_end + 2**15)
    assert (region.token, memory.nbytes) == (token, region.byte_size)
    del other
    assert pool.grow(region, region.data_end + 2**15)
    pool.close()
    with pytest.raises(ClosedError):
        pool.grow(region, region.data_end + PAGE_SIZE)


@pytest.mark.parametrize("kind", RegionKind)
def test_no_room_to_grow_leaves_nothing(pool: SlotPool, kind: RegionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    region, memory = pool.take_granted(pool.request(Need(PAGE_SIZE, kind=kind), "a test"))
    blocks, end, allocate = os.fstat(region.fd).st_blocks, region.data_end, os.posix_fallocate

    def without_the_last_page(fd: int, offset: int, byte_size: int) -> None:
        if offset == end + 7 * PAGE_SIZE:
            raise OSError(errno.ENOSPC, "no room")
        allocate(fd, offset, byte_size)

    monkeypatch.setattr(shared_file, "_SPACE_PIECE", PAGE_SIZE)
    monkeypatch.setattr(os, "posix_fallocate", without_the_last_page)
    assert not pool.grow(region, end + 8 * PAGE_SIZE, time.monotonic() + LONG_S)
    assert os.fstat(region.fd).st_blocks == blocks
    monkeypatch.undo()
    assert pool.grow(region, end + 8 * PAGE_SIZE)
    assert memory.nbytes == end


@pytest.mark.parametrize("kind", RegionKind)
def test_a_pool_closed_while_a_region_grows(pool: SlotPool, kind: RegionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    region, memory = pool.take_granted(pool.request(Need(PAGE_SIZE, kind=kind), "a test"))
    inode, allocate, found = os.fstat(region.fd).st_ino, os.posix_fallocate, list[int]()

    def close_first(fd: int, offset: int, byte_size: int) -> None:
        pool.close()
        found.append(os.fstat(fd).st_ino)
        allocate(fd, offset, byte_size)

    monkeypatch.setattr(os, "posix_fallocate", close_first)
    pool.grow(region, region.data_end + PAGE_SIZE)
    assert found == [inode]
    assert (pool.status.byte_size, len(region.buffer), memory[-1]) == (0, 0, 0)
    with pytest.raises(ClosedError):
        assert region.fd


def test_a_region_grows_once_if_two_ask_for_it(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    region, memory = pool.take_granted(pool.request(Need(PAGE_SIZE), "a test"))
    end, allocate = region.data_end + 8 * PAGE_SIZE, os.posix_fallocate
    with ThreadPoolExecutor() as threads:
        second = list[Future[bool]]()

        def ask_again(*arguments: int) -> None:
            second.append(threads.submit(pool.grow, region, end))
            wait(second, SOON_S)
            allocate(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", ask_again)
        assert pool.grow(region, end)
        token = region.token
        assert second.pop().result(LONG_S)
    assert (second, region.token, memory.nbytes < end) == ([], token, True)


def test_a_region_that_grows_is_its_calls_until_then_even_if_that_was_cancelled() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=4 * LONG_COPY))) as pool:
        region, memory = pool.take_granted(pool.request(NEED._replace(slot_count=1), "a test"))
        settings: Any = SimpleNamespace(deadline=math.inf)
        steps = taking.grow(pool, settings, region, memory, region.data_end + LONG_COPY)
        growing: Any = next(steps)
        steps.close()
        del memory
        assert pool.status.held == 1
        assert growing.work()
        del growing
        assert pool.status.idle == 1


def test_who_cannot_have_one_at_once_is_in_nobodys_way(pool: SlotPool, caplog: pytest.LogCaptureFixture) -> None:
    _, memory = pool.take_granted(pool.request(Need(2**15), "a test"))
    assert pool.request_at_once(Need(2**15), "another") is None
    assert (pool.wait_count, caplog.records) == (0, [])
    assert pool.take_idle(NEED, "a third") is None  # which asks no queue if somebody waits
    waiter = pool.request(NEED, "a third")
    assert waiter.granted.done()
    pool.withdraw(waiter)
    del memory
    assert pool.request_at_once(Need(2**15), "another") is not None
    with pytest.raises(BudgetError):
        pool.request_at_once(Need(2**17), "a test")
    pool.close()
    with pytest.raises(ClosedError):
        pool.request_at_once(NEED, "a test")
