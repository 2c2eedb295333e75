"""The header and the slot records of a managed region, byte by byte as they are drawn."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import HEADER_LENGTH, Header, SlotRecord

TOKEN = bytes(range(16))
SLOTS = 2
RECORD = 2 * layout.PAGE_SIZE
SIZE = 6 * layout.PAGE_SIZE

FIELDS = {
    "magic": (0, 8),
    "version": (8, 4),
    "slot_count": (12, 4),
    "byte_size": (16, 8),
    "token": (24, 16),
    "record_byte_size": (40, 4),
}


def region(byte_size: int = SIZE) -> memoryview:
    """Return the bytes of a region that was just made."""
    buffer = memoryview(bytearray(byte_size))
    layout.write_header(buffer, Header(SLOTS, SIZE, TOKEN, RECORD))
    return buffer


def header_of(buffer: memoryview) -> Header | None:
    return layout.parse_header(bytes(buffer[:HEADER_LENGTH]), len(buffer))


def test_the_header_lies_where_it_is_drawn() -> None:
    assert bytes(region()[:44]) == b"SHMBUREG" + struct.pack("<IIQ", 2, SLOTS, SIZE) + TOKEN + struct.pack("<I", RECORD)


def test_writing_the_header_touches_nothing_behind_it() -> None:
    assert not any(region()[44:])


@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), st.binary(min_size=16, max_size=16))
def test_a_header_is_read_as_it_was_written(slot_count: int, record_pages: int, data_pages: int, token: bytes) -> None:
    record = record_pages * layout.PAGE_SIZE
    size = layout.data_offset(slot_count, record) + data_pages * layout.PAGE_SIZE
    buffer = memoryview(bytearray(size))
    layout.write_header(buffer, Header(slot_count, size, token, record))
    assert header_of(buffer) == Header(slot_count, size, token, record)


def test_a_file_may_be_larger_than_the_region() -> None:
    assert header_of(region(SIZE + layout.PAGE_SIZE)) == Header(SLOTS, SIZE, TOKEN, RECORD)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", 0),
        ("version", 0),
        ("version", 1),
        ("version", 3),
        ("slot_count", 0),
        ("slot_count", 3),
        ("slot_count", layout.MAX_SLOT_COUNT + 1),
        ("slot_count", 2**32 - 1),
        ("byte_size", 0),
        ("byte_size", layout.data_offset(SLOTS, RECORD) - 1),
        ("byte_size", SIZE + 1),
        ("byte_size", 2**64 - 1),
        ("record_byte_size", 0),
        ("record_byte_size", 44),
        ("record_byte_size", 2048),
        ("record_byte_size", RECORD + 8),
        ("record_byte_size", 2 * RECORD),
        ("record_byte_size", layout.MAX_RECORD_BYTE_SIZE + layout.PAGE_SIZE),
        ("record_byte_size", 2**32 - 4096),
    ],
)
def test_a_header_with_a_wrong_field_is_none(field: str, value: int) -> None:
    buffer = region()
    offset, length = FIELDS[field]
    buffer[offset : offset + length] = value.to_bytes(length, "little")
    assert header_of(buffer) is None


@given(st.integers(0, 12 * 8 - 1))
def test_a_header_with_one_wrong_bit_in_its_magic_or_version_is_none(bit: int) -> None:
    buffer = region()
    buffer[bit // 8] ^= 1 << bit % 8
    assert header_of(buffer) is None


@pytest.mark.parametrize("length", [0, 1, 43, 44, layout.PAGE_SIZE, SIZE - 1])
def test_a_header_in_too_small_a_file_is_none(length: int) -> None:
    assert header_of(region()[:length]) is None


@given(st.binary(max_size=64), st.sampled_from([b"", b"SHMBUREG", b"SHMBUREG\2\0\0\0"]))
def test_whatever_is_read_as_a_header_fits_into_its_file(rest: bytes, start: bytes) -> None:
    header = header_of(memoryview(bytearray((start + rest).ljust(SIZE, b"\0"))))
    assert header is None or layout.data_offset(header.slot_count, header.record_byte_size) <= header.byte_size <= SIZE


def test_data_begins_behind_the_header_page_and_the_records() -> None:
    assert layout.data_offset(3, 4096) == 4 * 4096
    assert layout.data_offset(3, 8192) == 7 * 4096


def test_a_fresh_record_is_all_zero() -> None:
    record = SlotRecord(region(), 0, RECORD)
    assert (record.generation, record.started, record.completed) == (0, 0, 0)
    assert bytes(record.request) == record.copy_results() == bytes(RECORD // 2)
    assert record.room == RECORD // 2


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_record_lies_where_it_is_drawn(slot: int) -> None:
    buffer = region()
    record = SlotRecord(buffer, slot, RECORD)
    record.begin(11, b"table")
    record.started = 22
    record.complete(33, b"results")
    begin = layout.record_offset(slot, RECORD)
    assert begin == 4096 + slot * RECORD
    drawn = struct.pack("<Q5s", 11, b"table").ljust(RECORD // 2, b"\0") + struct.pack("<QQ7s", 22, 33, b"results")
    assert bytes(buffer[begin : begin + RECORD]) == drawn.ljust(RECORD, b"\0")
    assert bytes(record.request) == drawn[: RECORD // 2]
    assert record.copy_results() == drawn[RECORD // 2 :].ljust(RECORD // 2, b"\0")


words = st.integers(0, 2**64 - 1)


@given(words, words, words)
def test_a_record_is_read_as_it_was_written(generation: int, started: int, completed: int) -> None:
    buffer = region()
    record = SlotRecord(buffer, 1, RECORD)
    record.generation = generation
    record.started = started
    record.complete(completed, b"")
    again = SlotRecord(buffer, 1, RECORD)
    assert (again.generation, again.started, again.completed) == (generation, started, completed)


def test_a_generation_is_started_once_and_none_before_it() -> None:
    record = SlotRecord(region(), 0, RECORD)
    assert [record.start(generation) for generation in (5, 5, 4, 6)] == [True, False, False, True]
    assert record.started == 6


def test_a_record_shows_what_the_other_side_writes() -> None:
    buffer = region()
    reader, writer = SlotRecord(buffer, 0, RECORD), SlotRecord(buffer, 0, RECORD)
    writer.generation = 5
    assert reader.generation == 5


def test_a_full_record_touches_nothing_but_its_own_bytes() -> None:
    buffer = region()
    record = SlotRecord(buffer, 0, RECORD)
    record.begin(2**64 - 1, b"\xff" * (record.room - 8))
    assert not any(record.copy_results())
    record.started = 2**64 - 1
    record.complete(2**64 - 1, b"\xff" * (record.room - 16))
    assert not any(buffer[4096 + RECORD :])
    assert header_of(buffer) == Header(SLOTS, SIZE, TOKEN, RECORD)


def test_what_was_copied_out_stays_as_it_was() -> None:
    record = SlotRecord(region(), 0, RECORD)
    record.begin(1, b"before")
    copied = bytes(record.request)
    record.begin(2, b"behind")
    assert copied[:14] == struct.pack("<Q6s", 1, b"before")


def test_what_exceeds_the_record_is_not_written() -> None:
    buffer = region()
    record = SlotRecord(buffer, 0, RECORD)
    with pytest.raises(ValueError, match="."):
        record.begin(1, bytes(record.room - 7))
    with pytest.raises(ValueError, match="."):
        record.complete(1, b"x" * (record.room - 15))
    assert not any(buffer[4096:])
