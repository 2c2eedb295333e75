"""Row blocks: calls that are alike lie side by side, and nothing of one is ever another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory.pool import rows
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.rows import Row, RowBlocks
from shm_backend_utils.memory.pool.slot import SlotRegion

MEBIBYTE = 2**20
LAYOUTS = ["first", "second", "third"]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=MEBIBYTE))) as pool:
        yield pool


def region_of(pool: SlotPool, count: int = 3) -> tuple[SlotRegion, npt.NDArray[np.uint8]]:
    return pool.redeem(pool.request(Need(1, count), "block"))


def begun(
    pool: SlotPool, key: object = "calls", blocks: RowBlocks[str] | None = None
) -> tuple[RowBlocks[str], Row[str]]:
    blocks = blocks or RowBlocks()
    return blocks, blocks.begin(key, *region_of(pool), list(LAYOUTS))


def test_calls_get_the_rows_of_a_block_in_order(pool: SlotPool) -> None:
    blocks, first = begun(pool)
    taken = [first, blocks.take("calls"), blocks.take("calls")]
    assert [row and (row.slot.index, row.layout) for row in taken] == list(enumerate(LAYOUTS))
    assert blocks.take("calls") is None
    assert len({row.region.key for row in taken if row}) == 1
    first.region.is_spoiled = True
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
    slot.is_in_doubt = True
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
    assert (slot.generation, slot.is_in_doubt) == (generation + 1, False)


def test_the_memory_goes_back_when_all_rows_are_gone(pool: SlotPool) -> None:
    blocks, first = begun(pool)
    rows_taken = [first, blocks.take("calls")]
    del first
    rows_taken.pop(0)
    assert (pool.status.held, pool.status.idle) == (1, 0)
    rows_taken.clear()
    assert (pool.status.held, pool.status.idle) == (0, 1)
    assert blocks.take("calls") is None


def test_a_region_in_which_a_row_is_in_doubt_goes_through_care(pool: SlotPool) -> None:
    _, first = begun(pool)
    key = first.region.key
    first.slot.is_in_doubt = True
    slot = first.slot
    del first
    assert pool.status.idle == 1
    assert not slot.is_in_doubt
    assert (Path("/dev/shm") / key).exists()


def test_calls_that_differ_never_get_each_others_rows(pool: SlotPool) -> None:
    blocks, first = begun(pool, ("m", 1))
    _, other = begun(pool, ("m", 2), blocks)
    assert blocks.take(("m", 3)) is None
    for key, mine in ((("m", 1), first), (("m", 2), other)):
        row = blocks.take(key)
        assert row is not None
        assert row.region is mine.region


def test_a_block_is_wanted_where_calls_come_together_and_by_no_call_alone(pool: SlotPool) -> None:
    blocks: RowBlocks[str] = RowBlocks()
    for _ in range(3):
        assert blocks.take("calls") is None
        assert not blocks.is_wanted("calls")
        memory = region_of(pool, 1)[1]
        blocks.note_alone("calls", memory)
        del memory
    memory = region_of(pool, 1)[1]
    blocks.note_alone("calls", memory)
    assert blocks.is_wanted("calls"), "another one is in use"
    _, row = begun(pool, "calls", blocks)
    assert blocks.is_wanted("calls"), "a block is in use"
    second = blocks.take("calls")
    del memory, row, second
    assert blocks.is_wanted("calls"), "they came together the last time"
    assert not blocks.is_wanted("calls"), "but not for ever"
    blocks.expect("calls")
    assert blocks.is_wanted("calls")
    assert not blocks.is_wanted("calls"), "but not for ever"
    assert not blocks.is_wanted("others")


def test_keys_without_end_leave_a_bounded_memory(pool: SlotPool) -> None:
    blocks, first = begun(pool, "mine")
    memory = np.empty(1, np.uint8)
    for number in range(10 * rows._MAX_KEYS):
        blocks.note_alone(number, memory)
        assert len(blocks._calls) <= rows._MAX_KEYS
    assert blocks.take("mine") is None, "it was forgotten"
    first.memory[-1] = 1
    assert pool.status.held == 1
    del first
    assert pool.status.held == 0
