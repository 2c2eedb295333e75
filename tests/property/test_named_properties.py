"""What holds for every text that is sent as ``shm_io``, not only for those that somebody thought of."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import LENGTH_SIZE
from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol import named
from shm_backend_utils.protocol.claims import CudaRegionClaim, NamedRegionClaim, RegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from tests.property.random_tables import check_table

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
        _, table = named.parse_descriptor(text)
    except TableError as error:
        message = str(error)
    if message:
        assert len(message.encode()) < 500  # can be sent
        return None
    check_table(table, 0, 0)
    return table


@given(any_text)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parsed_or_refused(text)


@given(json_values)
def test_any_json_value_is_parsed_or_refused(value: object) -> None:
    parsed_or_refused(json.dumps(value))


@given(names, tables())
def test_what_is_encoded_is_parsed(model: str, table: Table) -> None:
    assert named.parse_descriptor(named.encode_descriptor(model, table)) == (model, table)


@given(tables(), st.data())
def test_any_json_value_in_any_place_of_a_descriptor_is_parsed_or_refused(table: Table, data: st.DataObject) -> None:
    value = json.loads(named.encode_descriptor("model", table))
    container, place = data.draw(st.sampled_from(places(value)))
    container[place] = data.draw(json_values)
    parsed_or_refused(json.dumps(value))


@given(tables(), st.data())
def test_a_field_that_occurs_twice_is_parsed_or_refused(table: Table, data: st.DataObject) -> None:
    text = named.encode_descriptor("model", table)
    field = data.draw(st.sampled_from(["v", "model", "regions", "inputs", "outputs"]))
    parsed_or_refused(f"{{{json.dumps(field)}:{json.dumps(data.draw(json_values))},{text[1:]}")
    parsed_or_refused(f"{text[:-1]},{json.dumps(field)}:{json.dumps(data.draw(json_values))}}}")


@given(tables(), st.data())
def test_a_text_that_breaks_off_is_refused(table: Table, data: st.DataObject) -> None:
    text = named.encode_descriptor("model", table)
    assert parsed_or_refused(text[: data.draw(st.integers(0, len(text) - 1))]) is None


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
