"""A slot's table, byte by byte as it is drawn, each way in which it may be wrong, and the places of a ring's frames."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import LentRegionClaim, NamedRegionClaim, encode_claim
from shm_backend_utils.protocol.spans import (
    MAX_FRAMED_GENERATION,
    MAX_TENSORS,
    InputSpan,
    OutputSpan,
    Ring,
    Table,
    brief,
    frame_number,
)

FP32, UINT8, BYTES = dtypes.BY_NAME["FP32"], dtypes.BY_NAME["UINT8"], dtypes.BYTES
BEGIN, SIZE = 8192, 16384  # where the region's data begins, and how large the region is
RECORD = 2048
LENT = LentRegionClaim("shmbu-1-5ec7e7", 4096, "0123456789abcdef" * 2, 0)
NAMED = NamedRegionClaim("weights")


def tensor(name: bytes, offset: int, size: int, number: int = 0, shape: tuple[int, ...] = (), **changes: int) -> bytes:
    fields = {"region": 0, "rank": len(shape), "name_length": len(name), "flags": 0, **changes}
    fixed = struct.pack("<QQHBBHH", offset, size, fields["region"], number, *list(fields.values())[1:])
    return fixed + struct.pack(f"<{len(shape)}Q", *shape) + name.ljust(-(-len(name) // 8) * 8, b"\0")


def record(inputs: list[bytes], outputs: list[bytes], regions: list[bytes] | None = None, **changes: Any) -> bytes:
    """Return the client's half of a record; the changes are of the head's fields."""
    body = b"".join([*(regions or []), *inputs, *outputs])
    head = {
        "generation": 7,
        "length": 32 + len(body),
        "input_count": len(inputs),
        "output_count": len(outputs),
        "region_count": len(regions or []),
        **dict.fromkeys(("frame_count", "frame_slot", "probe", "frame_stride"), 0),
        **changes,
    }
    data = struct.pack("<QIHHHHHHQ", *head.values()) + body
    return data.ljust(max(RECORD, len(data)), b"\0")


IMAGE = tensor(b"IMAGE", BEGIN, 24, 11, (2, 3))
ROOM = tensor(b"OUTPUT0", BEGIN + 256, 4096)


def decoded(data: bytes) -> Table:
    generation, found = table.decode(data, BEGIN, SIZE)
    assert generation == 7
    return found


def refusal(data: bytes) -> TableError:
    with pytest.raises(TableError) as caught:
        decoded(data)
    assert caught.value.code == "shm:table"
    assert len(str(caught.value)) < 300
    return caught.value


def refusal_of_input(**changes: Any) -> TableError:
    fields: dict[str, Any] = {"name": b"IMAGE", "offset": BEGIN, "size": 24, "number": 11, "shape": (2, 3), **changes}
    return refusal(record([tensor(**fields)], []))


def test_a_table_is_read_in_full_and_written_as_it_is_drawn() -> None:
    drawn = record([IMAGE], [ROOM], [encode_claim(LENT)], frame_count=1, frame_slot=3, frame_stride=77)
    found = decoded(drawn)
    assert found == Table(
        {"IMAGE": InputSpan(FP32, (2, 3), 0, BEGIN, 24)},
        {"OUTPUT0": OutputSpan(0, BEGIN + 256, 4096)},
        (LENT,),
        ring=Ring(3, 1, 77),
    )
    assert ((7).to_bytes(8, "little") + table.encode(found)).ljust(RECORD, b"\0") == drawn


def test_there_may_be_nothing_and_as_much_as_fills_the_record_and_an_input_may_also_be_an_output() -> None:
    assert decoded(record([], [])) == Table({}, {})
    assert decoded(record([tensor(b"X", BEGIN, 0, 2, (0, 2**63 - 1))], [])).inputs["X"].byte_size == 0
    assert decoded(record([IMAGE], [tensor(b"IMAGE", BEGIN + 256, 4)])).outputs["IMAGE"].byte_size == 4
    data = record([], [tensor(b"x" * (RECORD - 32 - 24), BEGIN, 1)])
    assert (len(data), len(decoded(data).outputs)) == (RECORD, 1)
    assert refusal(data[:-8]).field == "length"


def test_tensors_have_long_names_that_are_shortened_in_messages_up_to_32_dimensions_and_a_length_known_before() -> None:
    name = "é" * 32767 + "x"
    assert list(decoded(record([], [tensor(name.encode(), BEGIN, 0)])).outputs) == [name]
    error = refusal(record([IMAGE], [tensor(name.encode(), BEGIN, 24)]))
    assert error.field == f"outputs.{'é' * 61}..."
    assert refusal(record([IMAGE], [tensor(b"a\x1b[31m\n", BEGIN, 24)])).field == r"outputs.a\x1b[31m\n"
    assert brief("x" * 64) == "x" * 64
    assert brief("x" * 65) == "x" * 61 + "..."
    assert brief("é\n\x1b\ud800") == r"é\n\x1b\ud800"
    assert decoded(record([tensor(b"X", BEGIN, 1, 2, (1,) * 32)], [])).inputs["X"].shape == (1,) * 32
    assert refusal(record([tensor(b"X", BEGIN, 1, 2, (1,) * 33)], [])).found.startswith("rank 33 ")
    assert refusal_of_input(rank=255).found.startswith("rank 255 ")
    for name, shape in [("X", ()), ("12345678", (1,)), ("é" * 4, (0,) * 32), ("x" * 65535, (1, 2))]:
        data = tensor(name.encode(), BEGIN, 0, 2, shape)
        assert len(data) == table.tensor_length(name, len(shape))


@pytest.mark.parametrize("input_count", [0, 1, MAX_TENSORS // 2, MAX_TENSORS])
def test_a_table_has_up_to_512_tensors(input_count: int) -> None:
    inputs = [tensor(b"%d" % index, BEGIN, 24, 11, (2, 3)) for index in range(input_count)]
    outputs = [tensor(b"%d" % index, BEGIN + 24 + index, 1) for index in range(MAX_TENSORS - input_count)]
    found = decoded(record(inputs, outputs))
    assert (len(found.inputs), len(found.outputs)) == (input_count, MAX_TENSORS - input_count)
    assert refusal(record([*inputs, IMAGE], outputs)).field == "input_count and output_count"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        *(({"length": length}, ("length", "inputs[0]")) for length in (0, 8, 31, 32, 33, RECORD + 1, 2**31, 2**32 - 1)),
        *(({"length": 32 + len(IMAGE) + len(ROOM) + excess}, ("length",)) for excess in (1, 8, 100)),
        *(({"input_count": count}, ("input_count and output_count",)) for count in (MAX_TENSORS, 65535)),
        *(({"output_count": count}, ("input_count and output_count",)) for count in (MAX_TENSORS, 65535)),
        *(({f"{group}_count": 3}, (f"{group}s[",)) for group in ("input", "output", "region")),
        ({"probe": 1}, ("probe",)),
    ],
    ids=str,
)
def test_a_length_or_a_count_unlike_the_tensors_is_refused(changes: dict[str, int], fields: tuple[str, ...]) -> None:
    error = refusal(record([IMAGE], [ROOM], None, **changes))
    assert error.field.startswith(fields)
    if changes == {"length": 33 + len(IMAGE) + len(ROOM)}:
        assert error.expected == f"{changes['length'] - 1}, where the last of its tensors ends"


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        *((0, 4), (4096, 4), (BEGIN - 1, 1), (BEGIN - 4, 8)),
        *((SIZE - 3, 4), (SIZE, 1), (SIZE + 1, 0), (BEGIN, SIZE - BEGIN + 1)),
        *((2**63, 1), (2**64 - 1, 1), (2**64 - 4, 8), (BEGIN, 2**64 - 1), (BEGIN, 2**64 - BEGIN)),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_a_span_outside_the_data_is_refused(offset: int, size: int) -> None:
    assert refusal(record([], [tensor(b"Y", offset, size)])).field == "outputs[0]"
    assert refusal(record([tensor(b"X", offset, size, 2, (size,))], [])).field == "inputs[0]"


@pytest.mark.parametrize(("offset", "size"), [(BEGIN, SIZE - BEGIN), (SIZE - 1, 1), (SIZE, 0), (BEGIN, 0)])
def test_a_span_may_be_anywhere_in_the_data(offset: int, size: int) -> None:
    assert decoded(record([], [tensor(b"Y", offset, size)])).outputs["Y"] == OutputSpan(0, offset, size)
    found = decoded(record([tensor(b"X", offset, size, 2, (size,))], []))
    assert found.inputs["X"] == InputSpan(UINT8, (size,), 0, offset, size)


def test_a_span_may_be_in_a_further_region() -> None:
    regions = [encode_claim(LENT), encode_claim(NAMED)]
    outputs = [tensor(b"Y", 0, 4096, region=1), tensor(b"Z", 2**62, 2**62 - 1, region=2)]
    assert decoded(record([], outputs, regions)).outputs["Z"] == OutputSpan(2, 2**62, 2**62 - 1)
    assert refusal(record([], [tensor(b"Y", 0, 4097, region=1)], regions)).field == "outputs[0]"
    assert refusal(record([], [tensor(b"Y", 2**62, 2**62, region=2)], regions)).field == "outputs[0]"
    for beyond in (3, 65535):
        assert refusal(record([], [tensor(b"Y", BEGIN, 1, region=beyond)], regions)).field == "outputs[0]"


OVERFLOWING = [(0, 2**62), (2**62, 2**62, 0), (2**64 - 1, 0), (0, 2**61, 2)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"number": number}, "inputs[0].datatype") for number in (0, 15, 255)),
        *(({"shape": shape}, "inputs[0].byte_size") for shape in ((), (2,), (2, 3, 2), (0,), (7,), (2**62, 2**62))),
        ({"shape": (2**64 - 1,) * 32}, "inputs[0].byte_size"),
        *(({"number": 11, "size": 0, "shape": shape}, "inputs[0].shape") for shape in OVERFLOWING),
        *(({"number": 13, "size": 0, "shape": shape}, "inputs[0].shape") for shape in OVERFLOWING),
        *(({"number": 13, "shape": shape}, "inputs[0].byte_size") for shape in ((2, 3, 2), (7,), (2**62, 2))),
        *(({"name_length": length}, "inputs[0]") for length in (9, 65535)),
    ],
    ids=str,
)
def test_an_input_that_contradicts_itself_is_refused(changes: dict[str, Any], field: str) -> None:
    assert refusal_of_input(**changes).field == field


@pytest.mark.parametrize(("size", "shape"), [(24, (2, 3)), (25, (2, 3)), (4096, (6,)), (4, ()), (0, (0,)), (9, (0,))])
def test_strings_may_have_any_size_that_has_room_for_their_lengths(size: int, shape: tuple[int, ...]) -> None:
    found = decoded(record([tensor(b"WORDS", BEGIN + 1, size, 13, shape)], []))
    assert found.inputs["WORDS"] == InputSpan(BYTES, shape, 0, BEGIN + 1, size)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"number": 11}, ""), ({"shape": (1,)}, ""), *(({"flags": flags}, "") for flags in (1, 2, 65535))),
        *(({"name": name}, ".name") for name in (b"", b"\xff", b"\xed\xa0\x80", b"ab\xc3")),
    ],
    ids=str,
)
def test_outputs_have_no_type_or_shape_and_tensors_no_flags_or_odd_names(changes: dict[str, Any], field: str) -> None:
    output: dict[str, Any] = {"name": b"Y", "offset": BEGIN, "size": 4, **changes}
    assert refusal(record([], [tensor(**output)])).field == f"outputs[0]{field}"
    if not changes.keys() & {"number", "shape"}:
        assert refusal_of_input(**changes).field == f"inputs[0]{field}"


def test_a_name_that_is_there_twice_is_refused() -> None:
    assert refusal(record([IMAGE, IMAGE], [])).field == "inputs or outputs"
    assert refusal(record([], [ROOM, tensor(b"OUTPUT0", BEGIN, 1)])).field == "inputs or outputs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("frame_count", count) for count in (65, 65535)),
        *(("frame_slot", slot) for slot in (1023, 65535)),
        # No stride is shorter than Y; the second Y is not where the first Z is; the last place ends in the region.
        *(("frame_stride", stride) for stride in (0, 999, 2048, 3548, 3550, 2**63 - 1, 2**64 - 1)),
        ("generation", 2**32),
    ],
)
def test_a_ring_that_does_not_fit_is_refused(field: str, value: int) -> None:
    outputs = [tensor(b"Y", BEGIN, 1000), tensor(b"Z", BEGIN + 2049, 1500)]
    fields = {"generation": MAX_FRAMED_GENERATION, "frame_count": 2, "frame_slot": 1, "frame_stride": 3549}
    end = BEGIN + 2049 + 1500 + 3549
    assert table.decode(record([], outputs, None, **fields), BEGIN, end)[1].ring == Ring(1, 2, 3549)
    with pytest.raises(TableError) as caught:
        table.decode(record([], outputs, None, **{**fields, field: value}), BEGIN, end)
    assert caught.value.field == field


@pytest.mark.parametrize(("offset", "is_apart"), [(99, True), (4600, False), (5599, False), (5600, True)])
def test_an_input_lies_in_no_place_of_a_ring(offset: int, is_apart: bool) -> None:
    x = tensor(b"X", BEGIN + offset, 1, 2, (1,))
    data = record([x], [tensor(b"Y", BEGIN + 100, 1000)], None, frame_count=2, frame_slot=1, frame_stride=4500)
    if is_apart:
        assert decoded(data).ring == Ring(1, 2, 4500)
    else:
        assert refusal(data).field == "outputs.Y"


def test_each_place_is_one_stride_behind_the_one_before_and_each_frame_has_a_number() -> None:
    first = {"A": OutputSpan(0, 8192, 100), "B": OutputSpan(1, 0, 50)}
    assert Ring(1, 4, 1000).outputs(first, 0) == first
    assert Ring(1, 4, 1000).outputs(first, 3) == {"A": OutputSpan(0, 11192, 100), "B": OutputSpan(1, 3000, 50)}
    assert decoded(record([], [], frame_count=64, frame_slot=960)).ring == Ring(960, 64, 0), "the last slots"
    assert frame_number(MAX_FRAMED_GENERATION, (1 << 32) - 2) == 2**64 - 1
    assert frame_number(6, 0) > frame_number(5, (1 << 32) - 2), "no frame has the number of an earlier request's"
    assert frame_number(1, 0) > 0  # what is in a record that nobody has written to
