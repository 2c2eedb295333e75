"""Broken tables and results by the hundred thousand, and what holds for every table, all results and all ``shm_io``."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import LENGTH_SIZE
from shm_backend_utils.errors import PeerError, TableError, refusal
from shm_backend_utils.protocol import parameters, results, table
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim, NamedRegionClaim, RegionClaim
from shm_backend_utils.protocol.results import Results
from shm_backend_utils.protocol.spans import MAX_TENSORS, InputSpan, OutputSpan, Ring, Table
from tests.property.random_tables import (
    Sample,
    Valid,
    check_table,
    fuzzed,
    random_results,
    random_table,
    record_of,
    results_record,
)

PER_SERVERS_TABLE: Final = 100
CORPUS: Final = 500
LARGE_ONES: Final = 5
MOST_CHECKED: Final = 50  # the check takes its time
LONGEST_S: Final = 0.001

FIELDS: Final = {
    *("length", "probe", "generation", "region_count", "frame_count", "frame_slot", "frame_stride"),
    *("input_count and output_count", "inputs or outputs", "outputs.NAME"),
    *("inputs[N]", "inputs[N].name", "inputs[N].datatype", "inputs[N].byte_size", "inputs[N].shape"),
    *("outputs[N]", "outputs[N].name"),
    *("regions[N]", "regions[N].kind", "regions[N].flags", "regions[N].name", "regions[N].name_length"),
    *("regions[N].byte_size", "regions[N].fence"),
}


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    tables: int = request.config.getoption("--tables") * (1 + request.config.getoption("--all"))
    return PER_SERVERS_TABLE * tables


def check(found: tuple[int, Table], known: tuple[int, int]) -> None:
    if len(found[1].inputs) + len(found[1].outputs) <= MOST_CHECKED:
        check_table(found[1], *known)


def test_a_broken_table_is_refused_by_one_class_of_error_or_it_is_right(count: int) -> None:
    """Tables are of all sizes, up to the largest. No one takes a decoder longer than a millisecond.

    On a busy machine, which slows the largest valid table down as well, no longer than three of those.
    """
    rng = random.Random(1)
    samples = [random_table(rng, MAX_TENSORS if index < LARGE_ONES else None) for index in range(CORPUS)]
    valid = []
    for sample in samples:
        record = record_of(sample)
        end = struct.unpack_from("<I", record, 8)[0]
        valid.append(Valid(record, 0, end, (sample.data_begin, sample.byte_size)))
    found = fuzzed(count, rng, valid, lambda data, known: table.decode(data, *known), check)
    assert found.accepted + found.reasons.total() == count
    for (_, kind), error in found.errors.items():
        assert kind is TableError
        assert isinstance(error, TableError)
        assert refusal(error).startswith(f"shm:table: {error.field}: found ")
    assert found.reasons.keys() == FIELDS
    assert min(found.accepted, found.reasons.total()) > count / 10
    assert found.longest_s < max(LONGEST_S, 3 * found.longest_of_valid_s)


def test_broken_results_are_refused_by_one_class_of_error_or_taken(count: int) -> None:
    rng = random.Random(1)
    valid = []
    for found, byte_sizes in [random_results(rng) for _ in range(CORPUS)]:
        half = results_record(found)
        valid.append(Valid(half, 16, struct.unpack_from("<I", half, 16)[0], byte_sizes))
    outcome = fuzzed(count, rng, valid, results.decode, lambda *_: None)
    assert outcome.accepted + outcome.reasons.total() == count
    assert {kind for _, kind in outcome.errors} == {PeerError}
    assert outcome.longest_s < max(LONGEST_S, 3 * outcome.longest_of_valid_s)


UINT8: Final = dtypes.BY_NAME["UINT8"]
HEAD: Final = table.HEAD_LENGTH

randoms = st.randoms(use_true_random=False)
samples = st.builds(random_table, randoms)
found_results = st.builds(random_results, randoms)
generations = st.integers(1, 2**63 - 1)


def decoded_or_refused(data: bytes, data_begin: int, byte_size: int) -> Table | None:
    """Decode and check; None for what is refused. Everything else that is raised fails the test."""
    message = ""
    try:
        _, found = table.decode(data, data_begin, byte_size)
    except TableError as error:
        message = f"{error.code}: {error}"
    if message:
        assert message.startswith("shm:table: ")
        assert len(message.encode()) < 500
        return None
    check_table(found, data_begin, byte_size)
    return found


def results_or_refused(data: bytes, byte_sizes: list[int]) -> Results | None:
    try:
        return results.decode(data, byte_sizes)
    except PeerError:
        return None


@given(samples, generations, st.binary(max_size=64))
def test_what_is_encoded_is_decoded_whatever_lies_behind_it(sample: Sample, generation: int, rest: bytes) -> None:
    if sample.table.ring is not None:
        generation %= 2**32
    encoded = table.encode(sample.table)
    assert struct.unpack_from("<I", encoded)[0] == 8 + len(encoded)
    for data in (record_of(sample, generation), generation.to_bytes(8, "little") + encoded + rest):
        assert table.decode(data, sample.data_begin, sample.byte_size) == (generation, sample.table)
    check_table(*sample)


@given(found_results)
def test_results_that_are_encoded_are_decoded(sample: tuple[Results, list[int]]) -> None:
    found, byte_sizes = sample
    record = results_record(found)
    assert results.decode(record, byte_sizes) == found._replace(completed=1)
    encoded = results.encode(found.outputs, found.events)
    assert struct.unpack_from("<I", encoded)[0] == 16 + len(encoded)


@given(st.binary(min_size=HEAD, max_size=4096), st.integers(1, 2**20), st.integers(1, 2**20))
def test_any_bytes_are_decoded_or_refused(data: bytes, data_begin: int, data_size: int) -> None:
    decoded_or_refused(data, data_begin, data_begin + data_size)
    results_or_refused(data, [data_size])


small_spans = st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 8))
rings = st.none() | st.builds(Ring, st.just(1), st.integers(1, 4), st.integers(0, 12))


@given(st.lists(small_spans, max_size=5), st.lists(small_spans, max_size=5), rings)
def test_outputs_that_overlap_anything_are_refused_and_nothing_else_is(
    inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]], ring: Ring | None
) -> None:
    lent = LentRegionClaim("shmbu-1", 100, "0" * 32, 0)
    written = Table(
        {
            f"I{index}": InputSpan(UINT8, (size,), region, offset, size)
            for index, (region, offset, size) in enumerate(inputs)
        },
        {f"O{index}": OutputSpan(*span) for index, span in enumerate(outputs)},
        (lent,),
        ring,
    )
    places = [[(region, offset, size) for region, offset, size in outputs]]
    if ring is not None:
        places = [
            [(region, offset + place * ring.stride, size) for region, offset, size in outputs]
            for place in range(ring.frames)
        ]
    spans = [span for place in places for span in place]
    is_wrong = any(
        share_a_byte(output, other) for index, output in enumerate(spans) for other in [*inputs, *spans[:index]]
    ) or (ring is not None and (interlock(outputs, ring) or lies_in_ring(inputs, outputs, ring)))
    found = decoded_or_refused(record_of(Sample(written, 0, 100)), 0, 100)
    assert (found is None) == is_wrong


def share_a_byte(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Tell it in the slow and obvious way."""
    (region, offset, size), (other_region, other_offset, other_size) = one, other
    bytes_of_one = set(range(offset, offset + size))
    return region == other_region and bool(bytes_of_one & set(range(other_offset, other_offset + other_size)))


def bytes_of(spans: list[tuple[int, int, int]], region: int) -> list[int]:
    return [byte for where, offset, size in spans if where == region for byte in range(offset, offset + size)]


def interlock(outputs: list[tuple[int, int, int]], ring: Ring) -> bool:
    """Tell whether a place of a ring takes more bytes of a region than there are up to the next place."""
    places = [taken for region in (0, 1) if (taken := bytes_of(outputs, region))]
    return ring.frames > 1 and any(max(taken) + 1 - min(taken) > ring.stride for taken in places)


def lies_in_ring(inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]], ring: Ring) -> bool:
    """Tell whether an input has bytes between a ring's first byte and its last."""
    for region in (0, 1):
        taken = bytes_of(outputs, region)
        if taken:
            first, last = min(taken), max(taken) + (ring.frames - 1) * ring.stride
            if any(first <= byte <= last for byte in bytes_of(inputs, region)):
                return True
    return False


@given(samples, samples, st.data())
def test_a_table_that_changes_as_it_is_copied_is_no_harm(one: Sample, other: Sample, data: st.DataObject) -> None:
    """Only the copy counts. At worst it has the beginning of one table and the end of another."""
    first, second = record_of(one), record_of(other)
    cut = data.draw(st.integers(8, min(len(first), len(second))))
    decoded_or_refused(first[:cut] + second[cut:], one.data_begin, one.byte_size)


any_text = st.text(st.characters())  # with lone surrogates
numbers = st.integers() | st.integers(-(2**600), 2**600) | st.floats()
scalars = st.none() | st.booleans() | numbers | any_text
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(any_text, inner), max_leaves=30)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
hexadecimal = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Valid ones: at least one region, each with an input and an output."""
    regions: list[RegionClaim] = []
    inputs: dict[str, InputSpan] = {}
    outputs: dict[str, OutputSpan] = {}
    for index, name in enumerate(draw(st.lists(names, min_size=1, max_size=3, unique=True)), 1):
        dtype = draw(st.sampled_from(list(dtypes.BY_NAME.values())))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
        nbytes = math.prod(shape) * (dtype.itemsize or LENGTH_SIZE)
        offset = draw(st.integers(0, 100)) * (dtype.itemsize or 1)
        inputs[draw(names)] = InputSpan(dtype, shape, index, offset, nbytes)
        room = OutputSpan(index, offset + nbytes + draw(st.integers(0, 100)), draw(st.integers(0, 2**40)))
        outputs[f"{index} {draw(names)}"] = room
        size = max(1, room.offset + room.byte_size)
        handle = index.to_bytes(1, "little") * 64
        cuda = st.builds(CudaRegionClaim, st.just(handle), st.just(size), hexadecimal, st.none())
        regions.append(draw(cuda | st.just(NamedRegionClaim(name))))
    inputs = {f"{number} {name}": span for number, (name, span) in enumerate(inputs.items())}
    return Table(inputs, outputs, tuple(regions))


def parsed_or_refused(text: str) -> Table | None:
    """Parse; None for what is refused. Everything else that is raised fails the test."""
    message = ""
    try:
        _, table = parameters.parse_descriptor(text)
    except TableError as error:
        message = str(error)
    if message:
        assert len(message.encode()) < 500  # can be sent
        return None
    check_table(table, 0, 0)
    return table


@given(any_text, json_values)
def test_any_text_and_any_json_value_is_parsed_or_refused(text: str, value: object) -> None:
    parsed_or_refused(text)
    parsed_or_refused(json.dumps(value))


@given(names, tables(), json_values, st.data())
def test_any_change_is_parsed_or_refused(model: str, table: Table, written: object, data: st.DataObject) -> None:
    text = parameters.encode_descriptor(model, table)
    assert parameters.parse_descriptor(text) == (model, table)
    assert parsed_or_refused(text[: data.draw(st.integers(0, len(text) - 1))]) is None, "it breaks off"
    field = json.dumps(data.draw(st.sampled_from(["v", "model", "regions", "inputs", "outputs"])))
    parsed_or_refused(f"{{{field}:{json.dumps(written)},{text[1:]}")
    parsed_or_refused(f"{text[:-1]},{field}:{json.dumps(written)}}}")
    value = json.loads(text)
    container, place = data.draw(st.sampled_from(places(value)))
    container[place] = written
    parsed_or_refused(json.dumps(value))


def places(value: object) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value, as its container and its index or name."""
    inside: list[tuple[Any, Any]]
    if isinstance(value, dict):
        inside = [(value, name) for name in value]
    elif isinstance(value, list):
        inside = [(value, index) for index in range(len(value))]
    else:
        return []
    return inside + [place for container, name in inside for place in places(container[name])]
