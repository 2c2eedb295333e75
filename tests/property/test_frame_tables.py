"""Tables of frames, whatever stands in a record: what was written is read, and the rest is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.frame_table import REGION, decode_rooms, encode_rooms, room_since
from shm_backend_utils.protocol.layout import PAGE_SIZE, SlotRecord
from shm_backend_utils.protocol.spans import OutputSpan, frame_number

CLAIM = LentRegionClaim("shmbu-4711-0123456789abcdef", 1 << 40, "00112233445566778899aabbccddeeff", 0)
ROOM = PAGE_SIZE // 2

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@st.composite
def all_rooms(draw: st.DrawFn) -> dict[str, OutputSpan]:
    """Rooms one behind the other."""
    found, at = {}, 8192
    for name in draw(st.lists(names, max_size=8, unique=True)):
        byte_size = draw(st.integers(0, 1 << 30))
        found[name] = OutputSpan(REGION, at, byte_size)
        at += byte_size + draw(st.integers(0, 4096))
    return found


def record_with(table: bytes, number: int, released: int = 0) -> bytes:
    record = SlotRecord(memoryview(bytearray(2 * PAGE_SIZE)), 0, PAGE_SIZE)
    record.generation = released
    record.give_room(table, number)
    assert record.room_since == number
    assert record.generation == released
    return bytes(record.request)


@given(rooms=all_rooms(), generation=st.integers(1, 2**32 - 1), index=st.integers(0, 2**31), released=st.integers(0))
def test_what_was_written_is_read(rooms: dict[str, OutputSpan], generation: int, index: int, released: int) -> None:
    number = frame_number(generation, index)
    data = record_with(encode_rooms(CLAIM, rooms), number, released % 2**64)
    assert room_since(data) == number
    claim, said = decode_rooms(data)
    assert (claim, said.outputs, said.inputs, said.ring) == (CLAIM, rooms, {}, None)


@given(rooms=all_rooms(), at=st.integers(8, 400), changed=st.binary(min_size=1, max_size=8))
def test_what_is_changed_is_checked_as_if_written_so(rooms: dict[str, OutputSpan], at: int, changed: bytes) -> None:
    data = bytearray(record_with(encode_rooms(CLAIM, rooms), 1))
    data[at : at + len(changed)] = changed
    told = ""
    try:
        claim, said = decode_rooms(bytes(data))
    except TableError as error:
        told = str(error)
    else:
        ends = [span.offset + span.byte_size for span in said.outputs.values() if span.region == REGION]
        assert len(ends) == len(said.outputs)
        assert max(ends, default=0) <= claim.byte_size
    assert not told or told.startswith("frame.")
    assert CLAIM.key not in told
    assert CLAIM.token not in told


@given(data=st.binary(min_size=ROOM, max_size=ROOM))
def test_anything_is_refused(data: bytes) -> None:
    with pytest.raises(TableError):
        decode_rooms(data)


def test_a_table_does_not_reach_into_the_word_behind_it() -> None:
    rooms = {"x" * 40: OutputSpan(REGION, 8192, 8)}
    table = encode_rooms(CLAIM, rooms)
    for length in (ROOM - 8, ROOM - 7, ROOM):
        data = bytearray(record_with(table, 0))
        data[8:12] = length.to_bytes(4, "little")
        with pytest.raises(TableError, match=r"frame\.length: found \d+, expected "):
            decode_rooms(bytes(data))
