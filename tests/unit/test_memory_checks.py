"""How little a pool's options may say, how large its regions may be, and which of them make room."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import Slot, SlotRegion
from shm_backend_utils.protocol.layout import MAX_RECORD_BYTE_SIZE, MAX_SLOT_COUNT, PAGE_SIZE


def region_of(slots: int = 1, record: int = PAGE_SIZE) -> SlotRegion:
    return SlotRegion(PAGE_SIZE, slots, record, PRIVATE)


@pytest.mark.parametrize(
    ("option", "least", "too_little"),
    [
        ("max_bytes", 1, 0),
        ("max_device_bytes", 1, 0),
        ("max_batch_bytes", 0, -1),
        ("idle_s", 0, -0.1),
        ("idle_s", 0, float("nan")),
        ("head_room", 1, 0.99),
        ("head_room", 1, float("nan")),
        ("stream_guess_bytes", 0, -1),
    ],
)
def test_an_option_may_be_as_little_as_makes_sense_and_no_less(option: str, least: Any, too_little: Any) -> None:
    assert getattr(PoolOptions(**{option: least}), option) == least
    with pytest.raises(CallerError, match=f"PoolOptions.{option} is {too_little}"):
        PoolOptions(**{option: too_little})


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOT_COUNT + 1])
def test_a_region_of_too_few_or_too_many_slots_is_not_made(slots: int) -> None:
    with pytest.raises(ValueError, match=f"a region of {slots} slots was asked for"):
        ManagedRegion.create(100, slots)


@pytest.mark.parametrize("record", [0, -PAGE_SIZE, PAGE_SIZE + 8, MAX_RECORD_BYTE_SIZE + PAGE_SIZE])
def test_records_that_are_not_pages_are_not_made(record: int) -> None:
    with pytest.raises(ValueError, match=f"records of {record} bytes were asked for"):
        ManagedRegion.create(100, 1, record_byte_size=record)


def test_the_largest_region_can_be_made() -> None:
    for slots, record in ((MAX_SLOT_COUNT, PAGE_SIZE), (1, MAX_RECORD_BYTE_SIZE)):
        region = region_of(slots, record)
        assert region.slots[-1].record.room == record // 2
        region.destroy()


def test_a_model_that_begins_just_before_the_slot_is_fenced_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, fence = region_of().slots[0], Slot.fence
    slot.begin(b"")
    monkeypatch.setattr(Slot, "fence", lambda slot: slot.record.start(slot.generation) and fence(slot))
    assert not slot.fence_unstarted()


def test_a_slot_of_a_destroyed_region_is_closed_and_never_in_anybodys_way() -> None:
    region = region_of()
    slot = region.slots[0]
    assert (slot.begin(b""), slot.was_left, slot.is_completed, region.has_users) == (1, False, False, False)
    region.destroy()
    assert region.has_users, "nobody knows any more"
    for use in (lambda: slot.record, lambda: slot.begin(b"")):
        with pytest.raises(ClosedError, match="this client"):
            use()
    assert (bytes(slot.results), slot.was_left, slot.is_completed, slot.reclaim()) == (b"", False, False, False)
    slot.give_up()
    slot.release_frame(7)
    assert slot.generation == 1


def test_a_destroyed_region_gives_its_descriptor_away_once() -> None:
    region = region_of()
    given: list[Descriptor] = []
    region.on_destroy = lambda _, descriptor: given.append(descriptor)
    region.destroy()
    region.destroy()
    (descriptor,) = given
    assert os.fstat(descriptor.fileno()).st_nlink == 0


# The pool


def test_idle_regions_are_not_destroyed_for_a_call_that_cannot_have_enough_anyway() -> None:
    pool = SlotPool(PoolOptions(max_bytes=10 * PAGE_SIZE))
    held = pool.take_granted(pool.request(Need(4 * PAGE_SIZE, group="other"), "test"))
    idle = pool.take_granted(pool.request(Need(100), "test"))
    key = idle[0].key
    del idle
    waiter = pool.request(Need(6 * PAGE_SIZE), "test")
    assert not waiter.granted.done()
    assert (Path("/dev/shm") / key).exists()
    assert pool.status.idle == 1
    pool.withdraw(waiter)
    del held
    pool.close()


def test_a_region_of_the_same_kind_that_is_too_small_makes_room_before_others() -> None:
    pool = SlotPool(PoolOptions(max_bytes=20 * PAGE_SIZE))
    keys = {}
    for group in ("other", "direct"):  # the other one is idle for longer
        region, memory = pool.take_granted(pool.request(Need(100, group=group), "test"))
        keys[group] = region.key
        del memory
    held = pool.take_granted(pool.request(Need(2 * PAGE_SIZE), "test"))
    assert {group: (Path("/dev/shm") / key).exists() for group, key in keys.items()} == {"other": True, "direct": False}
    del held
    pool.close()


def test_a_pool_that_is_closed_while_a_region_is_made_does_not_hand_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlotPool(PoolOptions(max_bytes=10 * PAGE_SIZE))
    made: list[SlotRegion] = []

    def make(*arguments: Any) -> SlotRegion:
        made.append(SlotRegion(*arguments))
        pool.close()
        return made[0]

    monkeypatch.setattr(pool_module, "SlotRegion", make)
    with pytest.raises(ClosedError, match="this client"):
        pool.take_granted(pool.request(Need(100), "test"))
    assert not (Path("/dev/shm") / made[0].key).exists()
    assert pool.status.byte_size == 0
