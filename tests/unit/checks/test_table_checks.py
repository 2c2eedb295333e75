"""Tables as the configuration and the memory have them, tables at their bounds; descriptors and results that lie."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import BatchSizeError, PeerError, ShmError, TableError
from shm_backend_utils.model.call.received import check_rows, check_table
from shm_backend_utils.model.mapping.memory import HostMemory, Memory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import named, results, table
from shm_backend_utils.protocol.claims import MAX_REGIONS
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import MAX_FRAMED_GENERATION, MAX_TENSORS, InputSpan, OutputSpan, Ring, Table
from tests.unit.sessions import tensor

UINT8, FP32, BYTES = (BY_NAME[name] for name in ("UINT8", "FP32", "BYTES"))
BEGIN, SIZE = 4096, 8192


def spec(dtype: str = "UINT8", dims: list[int] | None = None, **config: Any) -> ModelSpec:
    """Return a model of input X and output Y."""
    tensors = {"input": [tensor("X", dtype, dims or [-1])], "output": [tensor("Y", dtype)]}
    return ModelSpec.from_config({"name": "m", **tensors, **config})


def memories() -> list[Memory]:
    """Return the slot's own memory, and a further region of `SIZE` bytes whose first `BEGIN` bytes are no data."""
    array = np.zeros(SIZE + 64, np.uint8)
    array = array[-array.__array_interface__["data"][0] % 64 :]
    return [HostMemory(array), HostMemory(array, byte_size=SIZE, data_begin=BEGIN)]


def output(offset: int, byte_size: int, ring: Ring | None = None) -> Table:
    return Table({}, {"Y": OutputSpan(1, offset, byte_size)}, ring=ring)


def lying_input(offset: int, byte_size: int) -> Table:
    return Table({"X": InputSpan(UINT8, (byte_size,), 1, offset, byte_size)}, {})


@pytest.mark.parametrize("table_of", [output, lying_input])
def test_tensors_may_have_all_data_of_a_further_region_and_no_byte_more(table_of: Any) -> None:
    check_table(spec(), table_of(BEGIN, SIZE - BEGIN), memories())
    check_table(spec(), table_of(SIZE - 1, 1), memories())
    for offset, byte_size in ((BEGIN, SIZE - BEGIN + 1), (BEGIN - 1, 1), (SIZE, 1), (SIZE + 1, 0)):
        with pytest.raises(TableError, match="its region's data"):
            check_table(spec(), table_of(offset, byte_size), memories())


def test_the_last_place_of_a_ring_ends_with_its_further_region() -> None:
    check_table(spec(), output(SIZE - 24, 8, Ring(0, 3, 8)), memories())
    with pytest.raises(TableError, match="outputs.Y: found 25 bytes"):
        check_table(spec(), output(SIZE - 24, 9, Ring(0, 3, 8)), memories())


def test_a_ring_of_one_frame_has_no_stride() -> None:
    check_table(spec("FP32"), output(BEGIN, 16, Ring(0, 1, 3)), memories())
    with pytest.raises(TableError, match="frame_stride: found 3"):
        check_table(spec("FP32"), output(BEGIN, 16, Ring(0, 2, 3)), memories())


def test_strings_lie_on_the_host_alone() -> None:
    on_gpu = cast(Memory, SimpleNamespace(device=0, address=0, data_begin=0, byte_size=SIZE))
    table = Table({"X": InputSpan(BYTES, (1,), 1, 0, 5)}, {})
    with pytest.raises(TableError, match="inputs.X: found strings in memory of a GPU"):
        check_table(spec("STRING"), table, [memories()[0], on_gpu])
    check_table(spec("STRING"), table, [memories()[0], HostMemory(np.zeros(8, np.uint8))])
    check_table(spec(), Table({"X": InputSpan(UINT8, (5,), 1, 0, 5)}, {}), [memories()[0], on_gpu])


def test_room_for_strings_may_begin_anywhere() -> None:
    check_table(spec("STRING"), output(BEGIN + 1, 16, Ring(0, 2, 17)), memories())


def test_room_for_an_output_of_unknown_type_may_begin_anywhere() -> None:
    check_table(spec("UNHEARD_OF"), output(BEGIN + 1, 16), memories())


def test_an_input_of_a_fixed_size_must_have_it() -> None:
    with pytest.raises(ShmError, match="tensor 'X' has shape"):
        check_table(spec(dims=[4]), lying_input(BEGIN, 5), memories())


def test_a_batch_whose_input_has_no_dimension_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="tensor 'X' has no dimension; its first one is the batch"):
        check_rows(Table({"X": InputSpan(UINT8, (), 0, BEGIN, 1)}, {}), 1)


DATA, REGION_SIZE = 8192, 16384
OUTPUT_COUNT = 14


def record(said: Table, generation: int = 1) -> bytes:
    return struct.pack("<Q", generation) + table.encode(said)


def ring(stride: int, byte_size: int = 100) -> Table:
    return Table({}, {"Y": OutputSpan(0, REGION_SIZE - 2 * 128 - 100, byte_size)}, ring=Ring(1, 3, stride))


def test_a_rings_last_place_may_end_with_its_region_and_not_a_byte_later() -> None:
    assert table.decode(record(ring(128)), DATA, REGION_SIZE)[1].ring == Ring(1, 3, 128)
    for said in (ring(129), ring(128, 101)):
        with pytest.raises(TableError, match="room for 3 frames of output 'Y' in its region"):
            table.decode(record(said), DATA, REGION_SIZE)


def test_a_stream_may_have_the_last_generation_that_leaves_room_for_its_frames() -> None:
    assert table.decode(record(ring(128), MAX_FRAMED_GENERATION), DATA, REGION_SIZE)[0] == MAX_FRAMED_GENERATION
    with pytest.raises(TableError, match=f"at most {MAX_FRAMED_GENERATION} for a stream"):
        table.decode(record(ring(128), MAX_FRAMED_GENERATION + 1), DATA, REGION_SIZE)


@pytest.mark.parametrize("room_behind", [0, 23, 24, 100])
def test_a_table_that_counts_one_tensor_more_than_it_has_is_refused(room_behind: int) -> None:
    data = bytearray(record(Table({}, {"Y": OutputSpan(0, DATA, 8)})) + bytes(room_behind))
    struct.pack_into("<H", data, OUTPUT_COUNT, 2)
    with pytest.raises(TableError, match=r"outputs\[1\]: found the table's end, expected a tensor"):
        table.decode(bytes(data), DATA, REGION_SIZE)


def test_an_empty_tensor_may_have_dimensions_of_63_bits_and_no_more() -> None:
    for size, is_allowed in ((2**63 - 1, True), (2**63, False)):
        said = Table({"X": InputSpan(BY_NAME["UINT8"], (0, size), 0, DATA, 0)}, {})
        if is_allowed:
            assert table.decode(record(said), DATA, REGION_SIZE)[1].inputs["X"].shape == (0, size)
            continue
        with pytest.raises(TableError, match="dimensions whose product has more than 63 bits"):
            table.decode(record(said), DATA, REGION_SIZE)


HALF = 1 << 20
SIZES = [1 << 16, *[0] * (MAX_REGIONS + 1)]
LENGTH = 16


def half(outputs: int = 1, events: int = 0) -> bytearray:
    """Return the model's half of a record, with honest results."""
    places = [OutputPlace(f"Y{number}", UINT8, (1,), 0, 8 * number, 1, False) for number in range(outputs)]
    encoded = results.encode(places, range(1, events + 1))
    data = bytearray(HALF)
    data[LENGTH : LENGTH + len(encoded)] = encoded
    return data


def length_of(data: bytes | bytearray) -> int:
    return int.from_bytes(data[LENGTH : LENGTH + 4], "little")


def refused(data: bytes | bytearray, match: str) -> None:
    with pytest.raises(PeerError, match=f"results break the protocol: {match}"):
        results.decode(bytes(data), SIZES)


@pytest.mark.parametrize("off", [-8, -1, 1, 8, 80])
def test_a_results_length_that_lies_is_found_out(off: int) -> None:
    data = half(2, 1)
    struct.pack_into("<I", data, LENGTH, length_of(data) + off)
    refused(data, f"{length_of(data) - off} bytes where their length says {length_of(data)}")


def test_results_may_fill_the_record_to_its_end() -> None:
    data = half()
    assert len(results.decode(bytes(data[: length_of(data)]), SIZES).outputs) == 1


def test_as_many_outputs_and_events_as_there_may_be_are_read() -> None:
    found = results.decode(bytes(half(MAX_TENSORS, MAX_REGIONS)), SIZES)
    assert (len(found.outputs), len(found.events)) == (MAX_TENSORS, MAX_REGIONS)


@pytest.mark.parametrize(("outputs", "events"), [(MAX_TENSORS + 1, 0), (1, MAX_REGIONS + 1)])
def test_more_outputs_or_events_than_there_may_be_are_not_read(outputs: int, events: int) -> None:
    refused(half(outputs, events), f"{outputs} outputs and {events} events")


def test_results_that_end_in_the_middle_of_an_output_are_refused() -> None:
    data = half(3)
    refused(data[: length_of(data) - 20], f"{length_of(data)} bytes where there is room")
    struct.pack_into("<I", data, LENGTH, 48)
    refused(data[:64], "they end too early")


def test_an_output_one_byte_beyond_its_region_is_refused() -> None:
    encoded = results.encode([OutputPlace("Y", UINT8, (2,), 0, SIZES[0] - 1, 2, False)])
    refused(bytes(16) + encoded, "2 bytes at offset 65535 that are not the request's")
    inside = results.encode([OutputPlace("Y", UINT8, (2,), 0, SIZES[0] - 2, 2, False)])
    assert results.decode(bytes(16) + inside, SIZES).outputs[0].offset == SIZES[0] - 2


VERSION = json.loads(named.encode_descriptor("m", Table({}, {})))["v"]
REGION = {"kind": "named", "name": "r"}


def refusal(**changes: Any) -> TableError:
    value = {"v": VERSION, "model": "m", "regions": [REGION], "inputs": {}, "outputs": {}, **changes}
    with pytest.raises(TableError) as caught:
        named.parse_descriptor(json.dumps(value))
    return caught.value


def test_tensors_without_regions_are_refused() -> None:
    error = refusal(regions=[], outputs={"Y": [0, 0, 0]})
    assert (error.field, error.found) == ("shm_io.outputs.Y[0]", "0")
    assert error.expected == "no tensor at all, as there are no regions"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "null or nothing"),
        (True, "a boolean"),
        (False, "a boolean"),
        (1, "a number"),
        (2.5, "a number"),
        ("", "an empty string"),
        ("secret", "another string"),
        ([1], "another array"),
    ],
)
def test_a_message_tells_the_kind_of_what_was_found_and_not_what_it_is(value: Any, found: str) -> None:
    assert refusal(inputs=value).found == found


@pytest.mark.parametrize(
    ("value", "found"), [(-1, "-1"), (2**255, "a number"), (-(2**255) + 1, str(1 - 2**255)[:61]), (2**300, "a number")]
)
def test_numbers_are_shown_unless_they_are_too_long(value: int, found: str) -> None:
    assert refusal(outputs={"Y": [0, value, 0]}).found.startswith(found)


def test_a_message_names_the_bounds_of_what_is_bounded() -> None:
    assert refusal(outputs={"Y": [1, 0, 0]}).expected == "an integer from 0 to 0"
    assert refusal(outputs={"Y": [0, -1, 0]}).expected == "a 64-bit integer of 0 or more"
