"""Tables at their bounds: a ring that fills its region, a stream's last generation, a table that ends too early."""

from __future__ import annotations

import struct

import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.spans import MAX_FRAMED_GENERATION, InputSpan, OutputSpan, Ring, Table

BEGIN, SIZE = 8192, 16384
OUTPUT_COUNT = 14


def record(said: Table, generation: int = 1) -> bytes:
    return struct.pack("<Q", generation) + table.encode(said)


def ring(stride: int, byte_size: int = 100) -> Table:
    return Table({}, {"Y": OutputSpan(0, SIZE - 2 * 128 - 100, byte_size)}, ring=Ring(1, 3, stride))


def test_a_rings_last_place_may_end_with_its_region_and_not_a_byte_later() -> None:
    assert table.decode(record(ring(128)), BEGIN, SIZE)[1].ring == Ring(1, 3, 128)
    for said in (ring(129), ring(128, 101)):
        with pytest.raises(TableError, match="room for 3 frames of output 'Y' in its region"):
            table.decode(record(said), BEGIN, SIZE)


def test_a_stream_may_have_the_last_generation_that_leaves_room_for_its_frames() -> None:
    assert table.decode(record(ring(128), MAX_FRAMED_GENERATION), BEGIN, SIZE)[0] == MAX_FRAMED_GENERATION
    with pytest.raises(TableError, match=f"at most {MAX_FRAMED_GENERATION} for a stream"):
        table.decode(record(ring(128), MAX_FRAMED_GENERATION + 1), BEGIN, SIZE)


@pytest.mark.parametrize("room_behind", [0, 23, 24, 100])
def test_a_table_that_counts_one_tensor_more_than_it_has_is_refused(room_behind: int) -> None:
    data = bytearray(record(Table({}, {"Y": OutputSpan(0, BEGIN, 8)})) + bytes(room_behind))
    struct.pack_into("<H", data, OUTPUT_COUNT, 2)
    with pytest.raises(TableError, match=r"outputs\[1\]: found the table's end, expected a tensor"):
        table.decode(bytes(data), BEGIN, SIZE)


def test_an_empty_tensor_may_have_dimensions_of_63_bits_and_no_more() -> None:
    for size, is_allowed in ((2**63 - 1, True), (2**63, False)):
        said = Table({"X": InputSpan(BY_NAME["UINT8"], (0, size), 0, BEGIN, 0)}, {})
        if is_allowed:
            assert table.decode(record(said), BEGIN, SIZE)[1].inputs["X"].shape == (0, size)
            continue
        with pytest.raises(TableError, match="dimensions whose product has more than 63 bits"):
            table.decode(record(said), BEGIN, SIZE)
