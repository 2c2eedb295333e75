"""Calls against the configuration and the room of a record, one bound at a time; what a pool keeps or refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import CallerError, ClosedError, MissingTensorError, TensorShapeError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.locks import SharedLease
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out, obstacle_in_tensors, record_byte_size
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


def test_a_slot_of_a_destroyed_region_is_closed_and_never_in_anybodys_way() -> None:
    region = region_of()
    slot = region.slots[0]
    assert (slot.begin(b""), slot.is_started, slot.is_completed) == (1, False, False)
    region.destroy()
    for use in (lambda: slot.record, lambda: slot.begin(b"")):
        with pytest.raises(ClosedError, match="this client"):
            use()
    assert (bytes(slot.results), slot.is_started, slot.is_completed, slot.reclaim()) == (b"", True, False, False)
    slot.give_up()
    slot.release_frame(7)
    assert slot.generation == 1


def test_a_region_that_is_forsaken_keeps_its_name_and_no_descriptor() -> None:
    region = region_of()
    path, fd = Path("/dev/shm") / region.key, region._region.segment.fileno()
    region.forsake()
    assert path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    path.unlink()


def test_a_destroyed_region_gives_its_descriptor_away_once() -> None:
    region = region_of()
    given: list[Descriptor] = []
    region.on_destroy = lambda _, descriptor: given.append(descriptor)
    region.destroy()
    region.destroy()
    (descriptor,) = given
    assert os.fstat(descriptor.fileno()).st_nlink == 0


def test_a_shared_lease_is_given_back_once_whatever_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(os, "close", closed.append)
    for fd in (0, 1_000_000):
        lease = SharedLease(Descriptor(int, fd))
        lease.give_back()
        lease.give_back()
    monkeypatch.undo()
    assert closed == [0, 1_000_000]


# The pool


def test_idle_regions_are_not_destroyed_for_a_call_that_cannot_have_enough_anyway() -> None:
    pool = SlotPool(PoolOptions(max_bytes=10 * PAGE_SIZE))
    held = pool.redeem(pool.request(Need(4 * PAGE_SIZE, group="other"), "test"))
    idle = pool.redeem(pool.request(Need(100), "test"))
    key = idle[0].key
    del idle
    ticket = pool.request(Need(6 * PAGE_SIZE), "test")
    assert not ticket.granted.done()
    assert (Path("/dev/shm") / key).exists()
    assert pool.status.idle == 1
    pool.withdraw(ticket)
    del held
    pool.close()


def test_a_region_of_the_same_kind_that_is_too_small_makes_room_before_others() -> None:
    pool = SlotPool(PoolOptions(max_bytes=20 * PAGE_SIZE))
    keys = {}
    for group in ("other", "direct"):  # the other one is idle for longer
        region, memory = pool.redeem(pool.request(Need(100, group=group), "test"))
        keys[group] = region.key
        del memory
    held = pool.redeem(pool.request(Need(2 * PAGE_SIZE), "test"))
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
        pool.redeem(pool.request(Need(100), "test"))
    assert not (Path("/dev/shm") / made[0].key).exists()
    assert pool.status.byte_size == 0


@pytest.mark.parametrize("use", ["request", "take_idle", "redeem"])
def test_a_closed_pool_gives_nothing(use: str) -> None:
    pool = SlotPool(PoolOptions(max_bytes=10 * PAGE_SIZE))
    ticket = pool.request(Need(100), "test")
    pool.close()
    if use == "take_idle":
        assert pool.take_idle(Need(100), "test") is None
        return
    with pytest.raises(ClosedError, match="this client"):
        pool.redeem(ticket) if use == "redeem" else pool.request(Need(100), "test")


FP32 = BY_NAME["FP32"]


def tensor(name: str, dims: Sequence[int] = (-1,), dtype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": list(dims), **more}


def spec(inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]] = (), **more: Any) -> ModelSpec:
    return ModelSpec.from_config({"name": "m", "input": list(inputs), "output": list(outputs), **more})


def laid_out(
    spec: ModelSpec, shape: tuple[int, ...], wanted: Any = None, learned: Any = None, rows: int = 8
) -> CallLayout:
    return lay_out(spec, {"X": CallInput(FP32, shape, 64)}, wanted, 4096, learned=learned or {}, most_rows=rows)


@pytest.mark.parametrize("shape", [(4, 3), (-1, 2), (-2, 2), (5, 2), (0, 3)])
def test_a_shape_that_the_configuration_forbids_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorShapeError):
        laid_out(spec([tensor("X", [-1, 2] if shape[0] < 4 else [4, 2])]), shape)


def test_an_empty_tensor_is_laid_out() -> None:
    assert laid_out(spec([tensor("X", [-1, 2])]), (0, 2)).table.inputs["X"].shape == (0, 2)


def test_optional_inputs_may_be_missing_and_others_not() -> None:
    assert laid_out(spec([tensor("X"), tensor("Z", optional=True)]), (1,)).batch_size is None
    with pytest.raises(MissingTensorError, match="needs input 'Z'"):
        laid_out(spec([tensor("X"), tensor("Z")]), (1,))
    found = laid_out(spec([tensor("A", optional=True), tensor("X"), tensor("Z", optional=True)]), (1,))
    assert list(found.table.inputs) == ["X"]


def test_an_output_whose_type_nobody_knows_gets_no_room() -> None:
    found = laid_out(spec([tensor("X")], [tensor("Y", [4]), tensor("Z", [4], "UNHEARD_OF")]), (1,))
    assert list(found.table.outputs) == ["Y"]


def names_of(byte_size: int) -> ModelSpec:
    """Return a model with so many bytes of names of inputs."""
    names: list[str] = []
    left = byte_size
    while left:
        length = min(left, 60_000)
        names.append(f"{len(names)}".ljust(length, "x"))
        left -= length
    return spec([tensor(name) for name in names])


def least_names_for(size: int) -> int:
    """Return with how many bytes of names a record gets larger than ``size``."""
    few, many = 1, size
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if record_byte_size(names_of(middle)) <= size else (few, middle)
    return many


def test_a_record_is_as_small_as_can_be() -> None:
    least = least_names_for(layout.PAGE_SIZE)
    room = layout.PAGE_SIZE // 2
    # 32 bytes of head, 32 of the tensor, 5 times 96 kept for further regions.
    assert (least - 1) == room - 32 - 32 - 5 * 160 - 96
    assert record_byte_size(names_of(least - 1)) == layout.PAGE_SIZE
    assert record_byte_size(names_of(least)) == 2 * layout.PAGE_SIZE


def test_names_of_tensors_may_have_65535_bytes_and_no_more() -> None:
    assert "a name of more than" not in str(obstacle_in_tensors(spec([tensor("x" * 65_535)])))
    assert "a name of more than 65535 bytes" in str(obstacle_in_tensors(spec([tensor("x" * 65_536)])))


def test_names_may_fill_the_largest_record_and_not_more() -> None:
    few, many = 1, layout.MAX_RECORD_BYTE_SIZE
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if obstacle_in_tensors(names_of(middle)) is None else (few, middle)
    count = -(-few // 60_000)
    assert few == layout.MAX_RECORD_BYTE_SIZE // 2 - 32 - 32 * count - 5 * 160 - 96 * count
