"""Row blocks: calls that are alike lie side by side, and nothing of one is ever another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.rows import Row, RowBlocks

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
