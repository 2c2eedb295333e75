"""A model's own memory for requests to other models: how it is taken, found, used again and removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.model.scratch import Scratch, ScratchSlot
from shm_backend_utils.protocol.region_layout import PAGE_SIZE

SHM = Path("/dev/shm")


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with contextlib.closing(Scratch()) as scratch:
        yield scratch


def answer(slot: ScratchSlot) -> None:
    """Do what the other model does at the end of a request."""
    slot.region.record(0).complete(slot.advance(), b"{}")


def used(scratch: Scratch, byte_size: int) -> ScratchSlot:
    """Return a slot that served a request, and is free again."""
    slot, _ = scratch.take(byte_size)
    answer(slot)
    return slot


def is_there(slot: ScratchSlot) -> bool:
    return (SHM / slot.region.segment.key).exists()


@pytest.mark.parametrize("byte_size", [0, 1, PAGE_SIZE, PAGE_SIZE + 1, 1_000_000])
def test_a_slot_has_the_room_that_was_asked_for_and_little_more(scratch: Scratch, byte_size: int) -> None:
    slot, memory = scratch.take(byte_size)
    assert memory.nbytes == slot.region.header.byte_size
    assert byte_size <= slot.capacity <= byte_size * 1.125 + 2 * PAGE_SIZE


def test_a_slot_is_used_again_when_no_array_is_left(scratch: Scratch) -> None:
    slot, memory = scratch.take(100)
    answer(slot)
    view = memory[8:].view(np.int32)
    del memory
    other = used(scratch, 100)
    assert other is not slot
    del view
    both = [scratch.take(100), scratch.take(100)]
    assert {slot for slot, _ in both} == {slot, other}


def test_calls_that_are_alike_share_a_slot(scratch: Scratch) -> None:
    slots = {used(scratch, 100_000 - step) for step in range(0, 5000, 500)}
    assert len(slots) == 1


def test_the_smallest_slot_that_fits_is_used(scratch: Scratch) -> None:
    large, large_memory = scratch.take(1_000_000)
    small, small_memory = scratch.take(10_000)
    for slot in (large, small):
        answer(slot)
    del large_memory, small_memory
    assert used(scratch, 9_000) is small
    assert used(scratch, 500_000) is large


def test_a_slot_in_which_a_model_may_still_write_is_removed(scratch: Scratch) -> None:
    slot, memory = scratch.take(100)
    slot.advance()
    del memory
    assert not is_there(slot)
    assert used(scratch, 100) is not slot


def test_only_some_idle_slots_are_kept(scratch: Scratch) -> None:
    taken = [scratch.take(100) for _ in range(20)]
    slots = [slot for slot, _ in taken]
    for slot in slots:
        answer(slot)
    taken.clear()
    assert sum(is_there(slot) for slot in slots) == 8


def test_generations_go_on_where_a_slot_is_used_again(scratch: Scratch) -> None:
    slot = used(scratch, 1)
    assert used(scratch, 1) is slot
    assert slot.generation == slot.region.record(0).generation == 2


def test_an_array_is_found_in_its_slot(scratch: Scratch) -> None:
    slot, memory = scratch.take(1000)
    assert slot_and_offset(scratch, memory[100:200]) == (slot, 100)
    assert slot_and_offset(scratch, memory) == (slot, 0)
    assert slot_and_offset(scratch, memory[-4:].view(np.float32)) == (slot, memory.nbytes - 4)


def slot_and_offset(scratch: Scratch, array: npt.NDArray[Any]) -> tuple[ScratchSlot, int] | None:
    found = scratch.find(array)
    return None if found is None else (found[0], found[2])


def test_an_array_of_no_slot_is_not_found(scratch: Scratch) -> None:
    _, memory = scratch.take(1000)
    assert scratch.find(np.zeros(10)) is None
    assert scratch.find(memory.copy()) is None


def test_an_array_that_only_begins_in_a_slot_is_not_found(scratch: Scratch) -> None:
    _, memory = scratch.take(1000)
    beyond = np.lib.stride_tricks.as_strided(memory[-8:], (16,), (1,))
    assert scratch.find(beyond) is None
    before = np.ndarray((16,), np.uint8, memory)
    interface = dict(before.__array_interface__)
    interface["data"] = (interface["data"][0] - 8, False)
    assert scratch.find(np.asarray(Pretended(interface))) is None


class Pretended:
    """An array where none is. Nothing may look into it."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def test_closing_removes_all_slots_and_leaves_arrays_valid() -> None:
    scratch = Scratch()
    idle = used(scratch, 1)
    slot, memory = scratch.take(1_000_000)
    memory[-8:] = 7
    scratch.close()
    assert not is_there(idle)
    assert not is_there(slot)
    assert memory[-8:].tolist() == [7] * 8
    del memory
    scratch.close()


def test_who_describes_a_slot_names_the_same_region_twice(scratch: Scratch) -> None:
    slot, _memory = scratch.take(1)
    own, lent = slot.claim, slot.lent_claim
    assert (own.key, own.byte_size, own.token, own.slot) == (lent.key, lent.byte_size, lent.token, lent.slot)
    assert own.key == slot.region.segment.key


def test_threads_never_share_a_slot(scratch: Scratch) -> None:
    def use(thread: int) -> bool:
        right = True
        for step in range(200):
            slot, memory = scratch.take(100)
            memory[slot.region.data_offset :] = (thread + step) % 251
            answer(slot)
            right &= bool((memory[slot.region.data_offset :] == (thread + step) % 251).all())
            del memory
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(4)))
