"""The header and the slot records of a managed region, byte by byte as they are drawn."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.protocol import region_layout as layout
from shm_backend_utils.protocol.region_layout import Header, SlotRecord

TOKEN = bytes(range(16))
SLOTS = 2
SIZE = 4 * layout.PAGE_SIZE

FIELDS = {"magic": (0, 8), "version": (8, 4), "slot_count": (12, 4), "byte_size": (16, 8), "token": (24, 16)}


def region(byte_size: int = SIZE) -> memoryview:
    """Return the bytes of a region that was just made."""
    buffer = memoryview(bytearray(byte_size))
    layout.write_header(buffer, Header(SLOTS, SIZE, TOKEN))
    return buffer


def test_the_header_lies_where_it_is_drawn() -> None:
    assert bytes(region()[:40]) == b"SHMBUREG" + struct.pack("<IIQ", 1, SLOTS, SIZE) + TOKEN


def test_writing_the_header_touches_nothing_behind_it() -> None:
    assert not any(region()[40:])


@given(st.integers(1, 20), st.integers(0, 3), st.binary(min_size=16, max_size=16))
def test_a_header_is_read_as_it_was_written(slot_count: int, data_pages: int, token: bytes) -> None:
    header = Header(slot_count, layout.data_offset(slot_count) + data_pages * layout.PAGE_SIZE, token)
    buffer = memoryview(bytearray(header.byte_size))
    layout.write_header(buffer, header)
    assert layout.read_header(buffer) == header


def test_a_region_may_be_mapped_with_more_than_its_own_bytes() -> None:
    assert layout.read_header(region(SIZE + layout.PAGE_SIZE)) == Header(SLOTS, SIZE, TOKEN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", 0),
        ("version", 0),
        ("version", 2),
        ("slot_count", 0),
        ("slot_count", SIZE // layout.PAGE_SIZE),
        ("slot_count", 2**32 - 1),
        ("byte_size", 0),
        ("byte_size", layout.data_offset(SLOTS) - 1),
        ("byte_size", SIZE + 1),
        ("byte_size", 2**64 - 1),
    ],
)
def test_a_header_with_a_wrong_field_is_none(field: str, value: int) -> None:
    buffer = region()
    offset, length = FIELDS[field]
    buffer[offset : offset + length] = value.to_bytes(length, "little")
    assert layout.read_header(buffer) is None


@given(st.integers(0, 12 * 8 - 1))
def test_a_header_with_one_wrong_bit_in_its_magic_or_version_is_none(bit: int) -> None:
    buffer = region()
    buffer[bit // 8] ^= 1 << bit % 8
    assert layout.read_header(buffer) is None


@pytest.mark.parametrize("length", [0, 1, 39, 40, layout.PAGE_SIZE, SIZE - 1])
def test_a_header_in_too_few_bytes_is_none(length: int) -> None:
    assert layout.read_header(region()[:length]) is None


@given(st.binary(max_size=64), st.sampled_from([b"", b"SHMBUREG", b"SHMBUREG\1\0\0\0"]))
def test_whatever_is_read_as_a_header_fits_into_its_buffer(rest: bytes, start: bytes) -> None:
    buffer = memoryview(bytearray((start + rest).ljust(SIZE, b"\0")))
    header = layout.read_header(buffer)
    assert header is None or layout.data_offset(header.slot_count) <= header.byte_size <= len(buffer)


def test_data_begins_behind_the_header_page_and_one_page_for_each_slot() -> None:
    assert layout.data_offset(3) == 4 * layout.PAGE_SIZE


def test_a_fresh_record_is_all_zero() -> None:
    record = SlotRecord(region(), 0)
    assert (record.generation, record.started, record.completed, record.results()) == (0, 0, 0, b"")


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_record_lies_where_it_is_drawn(slot: int) -> None:
    buffer = region()
    record = SlotRecord(buffer, slot)
    record.generation = 11
    record.started = 22
    record.complete(33, b"results")
    page = bytes(buffer[layout.PAGE_SIZE * (1 + slot) :][: layout.PAGE_SIZE])
    assert struct.unpack_from("<Q56xQQQ7s", page) == (11, 22, 33, 7, b"results")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_a_record_is_read_as_it_was_written(generation: int, started: int, completed: int, results: bytes) -> None:
    buffer = region()
    record = SlotRecord(buffer, 1)
    record.generation = generation
    record.started = started
    record.complete(completed, results)
    again = SlotRecord(buffer, 1)
    assert (again.generation, again.started, again.completed) == (generation, started, completed)
    assert again.results() == results


def test_a_record_shows_what_the_other_side_writes() -> None:
    buffer = region()
    reader, writer = SlotRecord(buffer, 0), SlotRecord(buffer, 0)
    writer.generation = 5
    assert reader.generation == 5


def test_a_full_record_touches_nothing_but_its_page() -> None:
    buffer = region()
    record = SlotRecord(buffer, 0)
    record.generation = record.started = 2**64 - 1
    record.complete(2**64 - 1, b"\xff" * layout.MAX_RESULTS_LENGTH)
    assert SlotRecord(buffer, 1).generation == 0
    assert not any(buffer[2 * layout.PAGE_SIZE :])
    assert layout.read_header(buffer) == Header(SLOTS, SIZE, TOKEN)


def test_shorter_results_replace_longer_ones() -> None:
    record = SlotRecord(region(), 0)
    record.complete(1, b"a long text")
    record.complete(2, b"short")
    assert record.results() == b"short"


def test_a_failed_call_leaves_no_results() -> None:
    record = SlotRecord(region(), 0)
    record.complete(1, b"results")
    record.complete(2, b"")
    assert (record.completed, record.results()) == (2, b"")


def test_results_stay_as_they_were_read() -> None:
    record = SlotRecord(region(), 0)
    record.complete(1, b"before")
    results = record.results()
    record.complete(2, b"behind")
    assert results == b"before"


@pytest.mark.parametrize("claimed", [layout.MAX_RESULTS_LENGTH + 1, 2**32, 2**64 - 1])
def test_results_end_with_the_record_whatever_length_is_claimed(claimed: int) -> None:
    buffer = region()
    struct.pack_into("<Q", buffer, layout.PAGE_SIZE + 80, claimed)
    assert SlotRecord(buffer, 0).results() == bytes(layout.MAX_RESULTS_LENGTH)


def test_results_that_exceed_the_record_are_not_written() -> None:
    buffer = region()
    with pytest.raises(ValueError, match="."):
        SlotRecord(buffer, 0).complete(1, b"x" * (layout.MAX_RESULTS_LENGTH + 1))
    assert not any(buffer[layout.PAGE_SIZE :])
