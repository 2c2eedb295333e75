"""Regions that several calls share, and a pool that many threads use: nobody gets what another one has."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool.inventory import Inventory, Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.rows import Row, RowBlocks
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.process import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER, parse_address
from tests.opened import open_region
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of
from tests.unit.side_by_side import side_by_side
from tests.unit.taken_regions import REGION, SHM, Memory, is_there, own_files, take

ALONE = 4  # so many calls have a region each
ROOM = 64 * 2 * ALONE * REGION  # a budget of which 8 calls may have a region


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**28))) as pool:
        yield pool


def taken(pool: SlotPool, count: int) -> list[tuple[SlotRegion, Memory]]:
    return [take(pool) for _ in range(count)]


def test_the_more_calls_there_are_the_more_share_the_next_region_with_a_slot_and_data_each(pool: SlotPool) -> None:
    calls = taken(pool, 300)
    sizes = Counter(region.key for region, _ in calls)
    assert list(sizes.values()) == [1] * ALONE + [8, 24, 72, 192]
    for (one, its), (other, others) in itertools.pairwise(calls[ALONE:]):
        assert one.data_offset + one.capacity == one.data_end <= one.byte_size
        if one.key == other.key:
            assert one.slots[0].address_pattern != other.slots[0].address_pattern
            assert one.data_end <= other.data_offset or other.data_end <= one.data_offset
            assert np.shares_memory(its, others)  # offsets are the region's in each


def test_a_region_with_a_slot_in_doubt_gives_back_the_others(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    doubted = calls[-1][0]
    doubted.slots[0].state = "sent"
    with contextlib.closing(open_region(doubted.key, doubted.token, "region")) as opened:
        assert opened.lease(doubted.slots[0].index).take()
        del calls
        assert (pool.status.idle, pool.status.quarantined) == (11, 1)
    assert (pool.status.idle, pool.status.quarantined) == (12, 0)


def test_idle_memory_goes_when_all_of_its_calls_are_over(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    (region, kept), size = calls[-1], pool.status.byte_size
    del calls
    pool.drop_idle()
    assert (pool.status.held, pool.status.idle) == (1, 7)
    assert pool.status.byte_size == size - ALONE * REGION == region.byte_size
    kept[region.data_offset] = 1
    del kept
    pool.drop_idle()
    assert pool.status.byte_size == 0
    assert not is_there(region)


def test_idle_regions_make_room_for_another_with_all_of_their_parts_though_a_result_is_kept() -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=ROOM))) as pool:
        calls = taken(pool, 12)
        small = calls[-1][0]
        del calls
        large, _ = take(pool, ROOM - 2 * PAGE_SIZE)
        assert pool.status.byte_size == large.byte_size <= ROOM
        assert not is_there(small)
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=2**20))) as pool:
        kept = taken(pool, 40)[-1][1]
        large, _ = take(pool, 800_000)
        assert large.capacity >= 800_000 > kept.nbytes


def test_they_outlive_the_pool_with_the_last_array(pool: SlotPool) -> None:
    calls = taken(pool, 12)
    pool.close()
    for number, (region, memory) in enumerate(calls):
        memory[-1] = number
        assert not is_there(region)
    assert calls[-1][1][-1] == 11


@pytest.mark.parametrize("is_kept", [True, False])
def test_one_that_is_spoiled_spoils_the_others(pool: SlotPool, is_kept: bool) -> None:
    calls = taken(pool, 12)
    spoiled, memory = calls[-1]
    kept = [memory] * is_kept
    del calls, memory
    spoiled.spoil("lost")
    calls = [pool.take_idle(Need(1), Origin.here("a call")) or take(pool) for _ in range(24)]
    assert spoiled.key not in {region.key for region, _ in calls}
    del calls
    kept.clear()
    assert pool.status.held == 0
    assert not is_there(spoiled)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_leaves_no_call_without_memory(pool: SlotPool, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    calls = taken(pool, ALONE)
    put_back, count = Inventory.put_back, itertools.count(1)

    def interrupted(inventory: Inventory, region: SlotRegion) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        put_back(inventory, region)

    with monkeypatch.context() as patch:
        patch.setattr(Inventory, "put_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(pool)
    for _ in range(20):
        region, memory = take(pool)
        memory[region.data_offset] = 1
        calls.append((region, memory))
    assert len({(region.key, region.slots[0].index) for region, _ in calls}) == len(calls)


@pytest.mark.parametrize("need", [Need(1, 2), Need(1, group="another")])
def test_calls_of_other_kinds_have_a_region_each(pool: SlotPool, need: Need) -> None:
    held = [pool.take_granted(pool.request(need, "a call")) for _ in range(12)]
    assert len({region.key for region, _ in held}) == 12
    assert all(len(region.slots) == need.slot_count for region, _ in held)


@pytest.mark.parametrize("room", [20, 600])
def test_they_are_fewer_where_the_budget_ends(room: int) -> None:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=room * REGION))) as pool:
        calls = taken(pool, room)
        assert pool.status.byte_size <= room * REGION
        assert pool.status.held == len(calls)


def test_where_the_machine_has_no_room_for_all_one_is_made(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = taken(pool, ALONE)
    make, asked = ManagedRegion.create, []

    def create(byte_size: int, slot_count: int, *rest: object) -> ManagedRegion:
        asked.append(slot_count)
        if slot_count > 1:
            raise MachineError("no room")
        return make(byte_size, slot_count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ManagedRegion, "create", create)
    calls.append(take(pool))
    assert asked == [2 * ALONE, 1]
    assert pool.status.byte_size == (ALONE + 1) * REGION


def begun(pool: SlotPool) -> tuple[RowBlocks[str], Row[str]]:
    region, memory = pool.take_granted(pool.request(Need(1, 3), "block"))
    blocks: RowBlocks[str] = RowBlocks()
    blocks.begin("calls", region, memory, ["first", "second", "third"])
    first = blocks.take("calls")
    assert first is not None
    return blocks, first


def test_a_row_in_doubt_is_handed_out_only_when_its_slot_is_reclaimed(pool: SlotPool) -> None:
    blocks, first = begun(pool)
    slot = cast(Any, blocks.take("calls")).slot
    slot.state = "sent"
    lease = first.region._region.lease(slot.index)
    assert lease.take()  # as a model that is at work there
    third: Any = blocks.take("calls")
    assert third.slot is not slot
    lease.give_back()
    generation = slot.generation
    again: Any = blocks.take("calls")
    assert again.slot is slot
    assert (slot.generation, slot.state) == (generation + 1, "free")


def test_a_region_in_which_a_row_is_in_doubt_goes_through_care(pool: SlotPool) -> None:
    _, first = begun(pool)
    key = first.region.key
    first.slot.state = "sent"
    slot = first.slot
    del first
    assert pool.status.idle == 1
    assert slot.state == "free"
    assert (SHM / key).exists()


def regions(server: FakeServer) -> list[str]:
    keys = [parse_address(order.parameters[SLOT_PARAMETER]).key for order in server.orders]
    server.orders.clear()
    return keys


def together(server: FakeServer, client: ShmClient, sizes: list[int]) -> int:
    """Make calls of so many rows, all sent before one is answered; return in how many regions they lay."""
    all_are_sent = threading.Barrier(len(sizes))

    server.before = lambda _: (all_are_sent.wait(30), None)[1]
    futures = [client.submit("m", {"IN0": np.full((size, 3), size, np.float32)}) for size in sizes]
    assert all((future.result(30)["OUT0"] == 2 * size).all() for size, future in zip(sizes, futures, strict=True))
    server.before = lambda _: None
    return len(set(regions(server)))


def test_calls_together_share_a_region_and_the_next_alone_counts_on_them() -> None:
    x = {"IN0": np.ones((2, 3), np.float32)}
    batched = config("m", dims="3", max_batch_size=16, dynamic_batching={})
    with FakeServer(batched) as server, client_of(server, path="direct") as client:
        client.infer("m", x).release()
        server.orders.clear()
        held = [client.infer("m", x) for _ in range(3)]
        assert len(set(regions(server))) == len(held), "calls one after another begin no block"
        held.clear()
        assert together(server, client, [2] * 5) == 2, "the first one could not know of the others"
        assert together(server, client, [2] * 5) == 1, "now it counts on them"
        for _ in range(2):
            client.infer("m", x).release()
        assert len(set(regions(server))) == 2
        assert together(server, client, [2, 3, 2, 3]) == 4, "those of another shape are no neighbours"


THREADS = 8
ROUNDS = 150
BUDGET = 10 * PAGE_SIZE


class Holders(dict[str, object]):
    def take(self, key: str) -> None:
        mine = object()
        assert self.setdefault(key, mine) is mine, "handed out twice"


def take_or_give_up(pool: SlotPool, chance: random.Random) -> Any:
    need = Need(chance.choice([100, 100, 5_000, 9_000]))
    idle = pool.take_idle(need, "thread")
    if idle is not None:
        return idle
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
        given = take_or_give_up(pool, chance)
        if given is None:
            continue
        region, memory = given
        del given
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
        del holders[region.key]
        del rest


@pytest.mark.usefixtures("switching_often")
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


@pytest.mark.usefixtures("switching_often")
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


@pytest.mark.usefixtures("switching_often")
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
            del holders[key]
            del row

    side_by_side(*[work] * 4)
    assert pool.status.held == 0
    pool.close()
