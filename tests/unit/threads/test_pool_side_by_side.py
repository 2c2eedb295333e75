"""One pool and many threads that take, wait, give up, give back and close: nobody gets what another one has."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from typing import Any

import pytest

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.rows import RowBlocks
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.side_by_side import side_by_side
from tests.unit.taken_regions import own_files

pytestmark = pytest.mark.usefixtures("switching_often")
THREADS = 8
ROUNDS = 150
BUDGET = 10 * PAGE_SIZE


class Holders:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()

    def take(self, key: str) -> None:
        with self._lock:
            assert key not in self._keys, "handed out twice"
            self._keys.add(key)

    def leave(self, key: str) -> None:
        with self._lock:
            self._keys.remove(key)


def take(pool: SlotPool, chance: random.Random) -> Any:
    need = Need(chance.choice([100, 100, 5_000, 9_000]))
    taken = pool.take_idle(need, "thread")
    if taken is not None:
        return taken
    waiter = pool.request(need, "thread")
    try:
        waiter.granted.result(chance.choice([0.0, 0.001, 10]))
    except concurrent.futures.TimeoutError:
        if chance.random() < 0.5:
            waiter.granted.cancel()
        pool.withdraw(waiter)
        return None
    return pool.take_granted(waiter)


def use(pool: SlotPool, holders: Holders, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        taken = take(pool, chance)
        if taken is None:
            continue
        region, memory = taken
        del taken
        holders.take(region.key)
        slot = region.slots[0]
        before = slot.generation
        assert slot.begin(b"") == before + 1
        memory[region.data_offset :] = seed
        if chance.random() < 0.7:
            slot.become_free("answer")
        if chance.random() < 0.05:
            region.spoil("lost")
        rest = memory[region.data_offset + 1 :]
        del memory
        assert (rest == seed).all()
        assert slot.generation == before + 1
        holders.leave(region.key)
        del rest


def test_threads_that_take_wait_and_give_up_never_share_a_region() -> None:
    pool, holders, before = SlotPool(PoolOptions(max_bytes=BUDGET, idle_s=0.01)), Holders(), len(own_files())
    is_over = threading.Event()

    def look_on() -> None:
        chance = random.Random(0)
        while not is_over.is_set():
            status = pool.status
            assert status.byte_size <= BUDGET
            if chance.random() < 0.2:
                pool.drop_idle()
            pool.take_unregistered()
            pool.held()

    watcher = threading.Thread(target=look_on)
    watcher.start()
    try:
        side_by_side(*[lambda seed=seed: use(pool, holders, seed) for seed in range(1, THREADS + 1)])
    finally:
        is_over.set()
        watcher.join()
    status = pool.status
    assert (status.held, status.quarantined) == (0, 0)
    pool.drop_idle()
    assert pool.status.byte_size == 0
    assert len(own_files()) == before
    pool.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_that_is_closed_under_threads_leaves_nothing_and_lets_nobody_wait(seed: int) -> None:
    pool, holders, before = SlotPool(PoolOptions(max_bytes=BUDGET, idle_s=0.01)), Holders(), len(own_files())
    rounds = threading.Semaphore(0)

    def use_until_closed(number: int) -> None:
        try:
            while True:
                use(pool, holders, number)
        except ClosedError:
            rounds.release()

    def close() -> None:
        chance = random.Random(seed)
        threading.Event().wait(chance.random() * 0.02)
        pool.close()

    side_by_side(close, *[lambda number=number: use_until_closed(number) for number in range(1, THREADS)])
    assert all(rounds.acquire(timeout=0) for _ in range(1, THREADS))
    assert len(own_files()) == before
    assert pool.status.byte_size == 0


def test_rows_of_a_block_go_to_one_thread_each() -> None:
    pool, blocks = SlotPool(PoolOptions(max_bytes=1 << 20)), RowBlocks[int]()
    need = Need(4096, slot_count=4)
    holders = Holders()

    def work() -> None:
        for _ in range(ROUNDS):
            taken = None
            while (row := blocks.take("alike")) is None:
                taken = pool.take_idle(need, "thread") or pool.take_granted(pool.request(need, "thread"))
                blocks.begin("alike", *taken, [0, 1, 2, 3])
            del taken
            key = f"{row.region.key}/{row.slot.index}"
            holders.take(key)
            row.slot.begin(b"")
            holders.leave(key)
            del row

    side_by_side(*[work] * 4)
    assert pool.status.held == 0
    pool.close()
