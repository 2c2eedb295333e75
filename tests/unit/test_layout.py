"""How a request names its slot, and the header and records of its region, byte by byte as they are drawn."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import TableError, VersionError
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import HEADER_LENGTH, Header, SlotRecord
from shm_backend_utils.protocol.parameters import SlotAddress, parse_address, parse_generation

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
    buffer = memoryview(bytearray(byte_size))
    layout.write_header(buffer, Header(SLOTS, SIZE, TOKEN, RECORD))
    return buffer


def header_of(buffer: memoryview) -> Header | None:
    return layout.parse_header(bytes(buffer[:HEADER_LENGTH]), len(buffer))


def test_the_header_lies_where_it_is_drawn() -> None:
    assert bytes(region()[:44]) == b"SHMBUREG" + struct.pack("<IIQ", 2, SLOTS, SIZE) + TOKEN + struct.pack("<I", RECORD)
    assert not any(region()[44:])
    assert header_of(region(SIZE + layout.PAGE_SIZE)) == Header(SLOTS, SIZE, TOKEN, RECORD), "a file may be larger"
    assert [layout.data_offset(3, size) for size in (4096, 8192)] == [4 * 4096, 7 * 4096]


@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), st.binary(min_size=16, max_size=16))
def test_a_header_is_read_as_it_was_written(slot_count: int, record_pages: int, data_pages: int, token: bytes) -> None:
    record = record_pages * layout.PAGE_SIZE
    size = layout.data_offset(slot_count, record) + data_pages * layout.PAGE_SIZE
    buffer = memoryview(bytearray(size))
    layout.write_header(buffer, Header(slot_count, size, token, record))
    assert header_of(buffer) == Header(slot_count, size, token, record)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("magic", [0]),
        ("version", [0, 1, 3]),
        ("slot_count", [0, 3, layout.MAX_SLOT_COUNT + 1, 2**32 - 1]),
        ("byte_size", [0, layout.data_offset(SLOTS, RECORD) - 1, SIZE + 1, 2**64 - 1]),
        ("record_byte_size", [0, 44, 2048, RECORD + 8, 2 * RECORD, layout.MAX_RECORD_BYTE_SIZE + 4096, 2**32 - 4096]),
    ],
)
def test_a_header_with_a_wrong_field_or_in_too_small_a_file_is_none(field: str, values: list[int]) -> None:
    for value in values:
        buffer = region()
        offset, length = FIELDS[field]
        buffer[offset : offset + length] = value.to_bytes(length, "little")
        assert header_of(buffer) is None, value
    assert [header_of(region()[:length]) for length in (0, 1, 43, 44, layout.PAGE_SIZE, SIZE - 1)] == [None] * 6


@given(st.binary(max_size=64), st.sampled_from([b"", b"SHMBUREG", b"SHMBUREG\2\0\0\0"]))
def test_whatever_is_read_as_a_header_fits_into_its_file(rest: bytes, start: bytes) -> None:
    header = header_of(memoryview(bytearray((start + rest).ljust(SIZE, b"\0"))))
    assert header is None or layout.data_offset(header.slot_count, header.record_byte_size) <= header.byte_size <= SIZE


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_record_lies_where_it_is_drawn(slot: int) -> None:
    buffer = region()
    record = SlotRecord(buffer, slot, RECORD)
    record.begin(11, b"table")
    record.model_words[0] = 22
    record.complete(33, b"results")
    begin = layout.record_offset(slot, RECORD)
    assert begin == 4096 + slot * RECORD
    drawn = struct.pack("<Q5s", 11, b"table").ljust(RECORD // 2, b"\0") + struct.pack("<QQ7s", 22, 33, b"results")
    assert bytes(buffer[begin : begin + RECORD]) == drawn.ljust(RECORD, b"\0")
    assert bytes(record.request) == drawn[: RECORD // 2]
    assert bytes(record.results) == drawn[RECORD // 2 :].ljust(RECORD // 2, b"\0")


def test_a_full_record_touches_nothing_but_its_own_bytes_and_what_exceeds_it_is_not_written() -> None:
    buffer = region()
    record = SlotRecord(buffer, 0, RECORD)
    with pytest.raises(ValueError, match="."):
        record.begin(1, bytes(record.room - 7))
    with pytest.raises(ValueError, match="."):
        record.complete(1, b"x" * (record.room - 15))
    assert not any(buffer[4096:])
    record.begin(2**64 - 1, b"\xff" * (record.room - 8))
    assert not any(bytes(record.results))
    record.complete(2**64 - 1, b"\xff" * (record.room - 16))
    assert not any(buffer[4096 + RECORD :])
    assert header_of(buffer) == Header(SLOTS, SIZE, TOKEN, RECORD)
    assert [record.start(generation) for generation in (5, 5, 4, 6)] == [True, False, False, True]
    assert record.started == 6


KEY = "shmbu-4711-5ec7e75ec7e75ec7"
SECRET = TOKEN.hex()
ADDRESS = f"2/resize/{KEY}/{SECRET}/7"


@pytest.mark.parametrize("model", ["resize", "m", "a b", "größe", "x:y.z-1", "M" * 300])
def test_an_address_is_read_as_it_was_written(model: str) -> None:
    for key, slot in ((KEY, 7), ("shmbu-1", 0), ("shmbu--", 1), ("shmbu-" + "0az-" * 16, 1023)):
        address = SlotAddress(model, key, SECRET, slot)
        assert str(address) == f"2/{model}/{key}/{SECRET}/{slot}"
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "value",
    [
        *["2", "2/", "2////", f"{ADDRESS}/0", f"{ADDRESS} ", f"{ADDRESS}\n"],
        *[f"2/resize/{KEY}/{SECRET}", f"2/resize/{KEY}/{SECRET}/", f"2//{KEY}/{SECRET}/0"],
        *[f"2/resize//{SECRET}/0", f"2/resize/{KEY}//0", f"2/resize/../{KEY}/{SECRET}/0"],
        *[f"2/resize/{key}/{SECRET}/0" for key in ("shmbu-", f"shmbu-{'a' * 65}", "SHMBU-1", "shmbu-A", "shmbu-a_b")],
        *[f"2/resize/{key}/{SECRET}/0" for key in ("shmbu-..", "triton_python_backend_shm_region_1")],
        *[f"2/resize/{KEY}/{secret}/0" for secret in (SECRET.upper(), SECRET[:-1], f"{SECRET}0")],
        *[f"2/resize/{KEY}/{SECRET}/{slot}" for slot in ("-1", "1.0", "1024", "10000000", "\u0663")],
        *[None, True, 2, 2.5, [ADDRESS], {}],
    ],
    ids=ascii,
)
def test_what_is_no_address_is_refused_and_not_shown(value: object) -> None:
    found = "other text, expected 2/MODEL/KEY" if isinstance(value, str) else "a value of type .*, expected a"
    with pytest.raises(TableError, match=f"shm_slot: found {found}") as refusal:
        parse_address(value)
    assert refusal.value.code == "shm:table"
    assert SECRET not in str(refusal.value)
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize("version", ["3", "02", "", "resize", SECRET, "9" * 20])
def test_another_version_is_refused_and_both_are_named(version: str) -> None:
    named = version if len(version) < 20 and version.isdigit() else "none"
    for value in (f"{version}/resize/{KEY}/{SECRET}/0", version):
        with pytest.raises(VersionError, match=f"found {named}, expected 2, ") as refusal:
            parse_address(value)
        assert refusal.value.code == "shm:version"
        assert SECRET not in str(refusal.value)


@given(st.text() | st.text("/2shmbu-0123456789abcdef", max_size=80))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except TableError:
        return
    assert address == parse_address(str(address))


@pytest.mark.parametrize("wrong", [None, True, 0, -1, 2**63, 10**300, 1.0, float("nan"), "1", [1], {}], ids=str)
def test_a_wrong_generation_is_refused_by_the_parameters_name(wrong: object) -> None:
    assert [parse_generation(right) for right in (1, 77, 2**63 - 1)] == [1, 77, 2**63 - 1]
    with pytest.raises(TableError, match="shm_generation: found another value, expected an integer from 1 to"):
        parse_generation(wrong)
