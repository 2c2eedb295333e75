"""Managed regions, against the real /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion, array_at
from shm_backend_utils.protocol import layout

FIELD = "regions[0]"
WRONG_TOKEN = "0" * 32


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(100, slot_count=2)
    yield region
    region.segment.unlink()
    region.close()


def opened(region: ManagedRegion) -> ManagedRegion:
    """Open the region a second time, as its peer does."""
    return ManagedRegion.open(region.segment.key, region.header.token.hex(), FIELD)


def path_of(region: ManagedRegion) -> Path:
    return Path("/dev/shm") / region.segment.key


def objects_of_this_process() -> list[Path]:
    return list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*"))


def test_two_regions_of_one_process_share_neither_key_nor_token(region: ManagedRegion) -> None:
    other = ManagedRegion.create(1)
    for each in (region, other):
        assert each.segment.key.startswith(f"shmbu-{os.getpid()}-")
    assert region.segment.key != other.segment.key
    assert region.header.token != other.header.token
    other.segment.unlink()
    other.close()


def test_both_sides_share_header_data_and_records(region: ManagedRegion) -> None:
    peer = opened(region)
    assert peer.header == region.header
    region.data()[:] = 7
    assert (peer.data() == 7).all()
    region.record(1).generation = 9
    assert (peer.record(1).generation, peer.record(0).generation) == (9, 0)
    with pytest.raises(IndexError):
        region.record(2)
    peer.close()


def test_a_new_region_has_whole_pages_of_data_behind_its_records(region: ManagedRegion) -> None:
    assert region.data_offset == 3 * layout.PAGE_SIZE
    assert path_of(region).stat().st_size == region.header.byte_size == region.data_offset + layout.PAGE_SIZE


def test_records_may_be_of_several_pages() -> None:
    region = ManagedRegion.create(1, slot_count=2, record_byte_size=3 * layout.PAGE_SIZE)
    try:
        assert region.data_offset == 7 * layout.PAGE_SIZE
        assert [region.record_offset(slot) // layout.PAGE_SIZE for slot in (0, 1)] == [1, 4]
        peer = opened(region)
        assert peer.data_offset == region.data_offset
        peer.close()
    finally:
        region.segment.unlink()
        region.close()


@pytest.mark.parametrize("slot_count", [0, -1, layout.MAX_SLOT_COUNT + 1])
def test_there_cannot_be_that_many_slots(slot_count: int) -> None:
    with pytest.raises(ValueError, match=f"a region of {slot_count} slots was asked for; expected 1 to 1024"):
        ManagedRegion.create(1, slot_count)


@pytest.mark.parametrize("size", [0, 1, -layout.PAGE_SIZE, layout.MAX_RECORD_BYTE_SIZE + layout.PAGE_SIZE])
def test_there_cannot_be_such_records(size: int) -> None:
    with pytest.raises(ValueError, match=f"records of {size} bytes were asked for; expected a multiple of 4096"):
        ManagedRegion.create(1, record_byte_size=size)


def test_more_than_the_machine_has_is_an_error_that_leaves_nothing_behind() -> None:
    with pytest.raises(MachineError, match="was asked for"):
        ManagedRegion.create(2**50)
    assert objects_of_this_process() == []


def test_data_begins_behind_the_records(region: ManagedRegion) -> None:
    region.data()[0] = 7
    assert region.bytes()[region.data_offset] == 7
    assert len(region.bytes()) == region.header.byte_size == region.data_offset + len(region.data())


def test_an_array_at_an_offset_is_a_view(region: ManagedRegion) -> None:
    array = array_at(region.data(), 8, np.dtype(np.float32), (2, 3), 24)
    assert array is not None
    array[1, 2] = 1.5
    assert region.data()[8:32].view(np.float32)[5] == 1.5
    assert array.flags.c_contiguous
    memory = region.data()
    memory.flags.writeable = False
    read_only = array_at(memory, 0, np.dtype(np.float32), (2,), 8)
    assert read_only is not None
    assert not read_only.flags.writeable


@pytest.mark.parametrize(
    ("shape", "fits"), [((2, 3), True), ((0, 9), True), ((), True), ((7,), False), ((3, 3), False)]
)
def test_an_array_that_exceeds_its_span_is_none(region: ManagedRegion, shape: tuple[int, ...], fits: bool) -> None:
    assert (array_at(region.data(), 0, np.dtype(np.float32), shape, 24) is not None) is fits


def test_a_region_that_has_lost_its_name_is_gone(region: ManagedRegion) -> None:
    region.check(FIELD)
    path_of(region).unlink()
    for look in (lambda: opened(region), lambda: region.check(FIELD)):
        with pytest.raises(RegionGoneError):
            look()


@pytest.mark.parametrize("token", [WRONG_TOKEN, "", "f" * 31])
def test_a_region_is_not_opened_with_another_token(region: ManagedRegion, token: str) -> None:
    with pytest.raises(RegionRefusedError, match="the token is not the region's") as caught:
        ManagedRegion.open(region.segment.key, token, FIELD)
    assert region.header.token.hex() not in str(caught.value)
    assert region.segment.key not in str(caught.value)


def test_what_is_open_is_not_changed_by_a_header_that_is_overwritten(region: ManagedRegion) -> None:
    peer = opened(region)
    region.bytes()[: layout.PAGE_SIZE] = 0xFF
    peer.check(FIELD)
    assert (peer.header, peer.data_offset) == (region.header, region.data_offset)
    peer.close()


def test_a_region_that_was_truncated_fails_the_check(region: ManagedRegion) -> None:
    os.truncate(path_of(region), layout.PAGE_SIZE)
    with pytest.raises(RegionRefusedError, match=f"but {layout.PAGE_SIZE} are there"):
        region.check(FIELD)


def test_an_array_outlives_its_region(region: ManagedRegion) -> None:
    array = region.data()[:40].view(np.uint32)
    region.segment.unlink()
    region.close()
    array[:] = 3
    assert array.sum() == 30


def test_a_closed_region_without_arrays_is_unmapped(region: ManagedRegion) -> None:
    region.close()
    assert region.segment.key not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    "use",
    [
        lambda region: region.data(),
        lambda region: region.bytes(),
        lambda region: region.record(0),
        lambda region: region.segment.buffer(),
    ],
    ids=["data", "bytes", "record", "buffer"],
)
def test_a_closed_region_says_so(region: ManagedRegion, use: Callable[[ManagedRegion], object]) -> None:
    region.close()
    region.close()
    with pytest.raises(ClosedError, match="is closed"):
        use(region)
    with pytest.raises(RegionGoneError, match="was unmapped"):
        region.check(FIELD)
