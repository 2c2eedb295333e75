"""Row blocks: calls that are alike lie side by side, and nothing of one is ever another's; no lone call pays for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.rows import Row, RowBlocks
from shm_backend_utils.protocol.address import SLOT_PARAMETER, parse_address
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of

MEBIBYTE = 2**20
LAYOUTS = ["first", "second", "third"]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        yield pool


def begun(pool: SlotPool) -> tuple[RowBlocks[str], Row[str]]:
    region, memory = pool.redeem(pool.request(Need(1, 3), "block"))
    blocks: RowBlocks[str] = RowBlocks()
    blocks.begin("calls", region, memory, list(LAYOUTS))
    first = blocks.take("calls")
    assert first is not None
    return blocks, first


def test_calls_get_the_rows_of_a_block_in_order(pool: SlotPool) -> None:
    blocks, first = begun(pool)
    taken = [first, blocks.take("calls"), blocks.take("calls")]
    assert [row and (row.slot.index, row.layout) for row in taken] == list(enumerate(LAYOUTS))
    assert blocks.take("calls") is None
    assert len({row.region.key for row in taken if row}) == 1
    first.region.spoil("lost")
    taken.pop()
    assert blocks.take("calls") is None, "its region is spoiled"


def test_a_row_whose_call_is_over_is_the_next_ones(pool: SlotPool) -> None:
    blocks, first = begun(pool)
    second, third = blocks.take("calls"), blocks.take("calls")
    assert second is not None
    view, generation = second.memory[5:], second.slot.generation
    del second
    assert blocks.take("calls") is None
    del view
    again = blocks.take("calls")
    assert again is not None
    assert again.layout == "second"
    assert again.slot.generation == generation, "nobody doubts that it is over"
    assert (first.layout, third and third.layout) == ("first", "third")


def test_a_row_in_doubt_is_handed_out_only_when_its_slot_is_reclaimed(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, first = begun(pool)
    row = blocks.take("calls")
    assert row is not None
    slot = row.slot
    slot.state = "sent"
    del row
    lease = first.region._region.lease(slot.index)
    assert lease.take()  # as a model that is at work there
    third = blocks.take("calls")
    assert third is not None
    assert third.slot is not slot
    lease.give_back()
    generation = slot.generation
    again = blocks.take("calls")
    assert again is not None
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
    assert (Path("/dev/shm") / key).exists()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m", dims="3", max_batch_size=16, dynamic_batching={})) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server, path="direct") as client:
        client.infer("m", {"IN0": np.ones((2, 3), np.float32)}).release()
        server.orders.clear()
        yield client


def regions(server: FakeServer) -> list[str]:
    """Return the region of each request since the last time."""
    keys = [parse_address(order.parameters[SLOT_PARAMETER]).key for order in server.orders]
    server.orders.clear()
    return keys


def together(server: FakeServer, client: ShmClient, sizes: list[int]) -> int:
    """Make calls of so many rows, all sent before one is answered; return in how many regions they lay."""
    all_are_sent = threading.Barrier(len(sizes))

    def wait(_: Order) -> None:
        all_are_sent.wait(30)

    server.before = wait
    futures = [client.submit("m", {"IN0": np.full((size, 3), size, np.float32)}) for size in sizes]
    assert all((future.result(30)["OUT0"] == 2 * size).all() for size, future in zip(sizes, futures, strict=True))
    server.before = lambda _: None
    return len(set(regions(server)))


def test_calls_one_after_another_begin_no_block_even_while_results_are_held(
    server: FakeServer, client: ShmClient
) -> None:
    held = [client.infer("m", {"IN0": np.ones((2, 3), np.float32)}) for _ in range(3)]
    assert len(set(regions(server))) == len(held)


def test_calls_under_way_together_share_a_region_and_the_next_one_alone_counts_on_others_but_once(
    server: FakeServer, client: ShmClient
) -> None:
    assert together(server, client, [2] * 5) == 2, "the first one could not know of the others"
    assert together(server, client, [2] * 5) == 1, "now it counts on them"
    for _ in range(2):
        client.infer("m", {"IN0": np.ones((2, 3), np.float32)}).release()
    assert len(set(regions(server))) == 2
    assert together(server, client, [2, 3, 2, 3]) == 4, "those of another shape are no neighbours"
