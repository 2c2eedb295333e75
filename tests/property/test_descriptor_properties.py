"""What holds for every text and every descriptor, not only for those that somebody thought of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import LENGTH_SIZE
from shm_backend_utils.errors import DescriptorError
from shm_backend_utils.protocol import descriptor
from shm_backend_utils.protocol.descriptor import Descriptor, InputSpan, OutputSpan, SystemRegionClaim

INT64 = 2**63 - 1
SECRET_TOKEN = "feedfacecafebeef" * 2
Json = dict[str, Any]

any_text = st.text(st.characters())  # with lone surrogates
numbers = st.integers() | st.integers(-(2**600), 2**600) | st.floats()
scalars = st.none() | st.booleans() | numbers | any_text
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(any_text, inner), max_leaves=30)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=5)
tokens = st.text("0123456789abcdef", min_size=32, max_size=32)


def parsed_or_refused(text: str) -> Descriptor | None:
    """Parse; None for what is refused. Everything else that is raised fails the test."""
    try:
        result = descriptor.parse(text)
    except DescriptorError:
        return None
    assert type(result) is Descriptor
    return result


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    """Valid descriptors: at least one region, one input and one output, each with bytes of its own or with none."""
    keys = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    regions = []
    inputs: dict[str, InputSpan] = {}
    outputs: dict[str, OutputSpan] = {}
    for index, key in enumerate(keys):
        end = draw(st.integers(0, 2**40))
        for name in draw(st.lists(names, min_size=1, max_size=3)):
            dtype = draw(st.sampled_from(list(dtypes.BY_NAME.values())))
            shape = tuple(draw(shapes))
            is_strings = dtype is dtypes.BYTES
            nbytes = math.prod(shape) * (LENGTH_SIZE if is_strings else dtype.itemsize)
            nbytes += draw(st.integers(0, 2**40)) if is_strings else 0
            offset = end + draw(st.integers(0, 100))
            inputs[name] = InputSpan(index, offset, nbytes, dtype, shape)
            end = offset + nbytes
        for name in draw(st.lists(names, min_size=1, max_size=3)):
            outputs[name] = OutputSpan(index, end + draw(st.integers(0, 100)), draw(st.integers(0, 2**40)))
            end = outputs[name].offset + outputs[name].byte_size
        byte_size = max(1, end + draw(st.integers(0, 2**40)))
        token, slot = draw(tokens), draw(st.integers(0, INT64))
        regions.append(SystemRegionClaim(key, byte_size, token, slot))
    return Descriptor(draw(names), tuple(regions), inputs, outputs)


@given(any_text)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parsed_or_refused(text)


@given(json_values)
def test_any_json_value_is_parsed_or_refused(value: object) -> None:
    parsed_or_refused(json.dumps(value))


@given(descriptors(), st.data())
def test_any_json_value_in_any_place_of_a_descriptor_is_parsed_or_refused(
    valid: Descriptor, data: st.DataObject
) -> None:
    value = json.loads(descriptor.encode(valid))
    container, place = data.draw(st.sampled_from(list(places(value))))
    container[place] = data.draw(json_values)
    parsed_or_refused(json.dumps(value))


@given(descriptors(), st.data())
def test_a_field_that_occurs_twice_is_parsed_or_refused(valid: Descriptor, data: st.DataObject) -> None:
    text = descriptor.encode(valid)
    field = data.draw(st.sampled_from(["v", "model", "regions", "inputs", "outputs"]))
    parsed_or_refused(f"{{{json.dumps(field)}:{json.dumps(data.draw(json_values))},{text[1:]}")
    parsed_or_refused(f"{text[:-1]},{json.dumps(field)}:{json.dumps(data.draw(json_values))}}}")


@given(descriptors(), st.data())
def test_a_text_that_breaks_off_is_refused(valid: Descriptor, data: st.DataObject) -> None:
    text = descriptor.encode(valid)
    assert parsed_or_refused(text[: data.draw(st.integers(0, len(text) - 1))]) is None


@given(descriptors())
def test_parse_returns_what_was_encoded(valid: Descriptor) -> None:
    assert descriptor.parse(descriptor.encode(valid)) == valid


@given(descriptors(), st.data())
def test_a_broken_rule_is_refused_by_its_fields_name(valid: Descriptor, data: st.DataObject) -> None:
    value = json.loads(descriptor.encode(valid))
    broken, field = data.draw(st.sampled_from(BREAKING_CHANGES))(value, data)
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(json.dumps(broken))
    assert caught.value.field == field
    assert f"shm_io.{field}:" in str(caught.value)


@given(descriptors(), st.data())
def test_no_message_holds_a_key_or_a_token(valid: Descriptor, data: st.DataObject) -> None:
    value = json.loads(descriptor.encode(valid))
    for index, region in enumerate(value["regions"]):
        region |= {"key": f"shmbu-secret-{index}", "token": SECRET_TOKEN}
    broken, _ = data.draw(st.sampled_from(BREAKING_CHANGES))(value, data)
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(json.dumps(broken))
    assert "shmbu-secret" not in str(caught.value)
    assert SECRET_TOKEN not in str(caught.value)


@given(json_values)
def test_any_value_is_a_generation_or_refused(value: object) -> None:
    try:
        generation = descriptor.check_generation(value)
    except DescriptorError:
        return
    assert generation is value
    assert type(value) is int
    assert 1 <= value <= INT64


small_spans = st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 8))


@given(st.lists(small_spans, max_size=5), st.lists(small_spans, max_size=5))
def test_outputs_that_overlap_anything_are_refused_and_nothing_else_is(
    inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]]
) -> None:
    regions = [
        {"kind": "system", "key": f"shmbu-{index}", "byte_size": 28, "token": "0" * 32, "slot": 0} for index in range(2)
    ]
    value = {
        "v": 1,
        "model": "model",
        "regions": regions,
        "inputs": {f"I{index}": [*span, "UINT8", [span[2]]] for index, span in enumerate(inputs)},
        "outputs": {f"O{index}": span for index, span in enumerate(outputs)},
    }
    offenders = {
        f"outputs.O{index}"
        for index, output in enumerate(outputs)
        if any(share_a_byte(output, other) for other in [*inputs, *outputs[:index], *outputs[index + 1 :]])
    }
    if not offenders:
        descriptor.parse(json.dumps(value))
        return
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(json.dumps(value))
    assert caught.value.field in offenders


def share_a_byte(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Tell it in the slow and obvious way."""
    (region, offset, size), (other_region, other_offset, other_size) = one, other
    bytes_of_one = set(range(offset, offset + size))
    return region == other_region and bool(bytes_of_one & set(range(other_offset, other_offset + other_size)))


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


# Each of these breaks one rule in a JSON descriptor, and returns the result and the field to be named.

Change = Callable[[Json, st.DataObject], tuple[Json, str]]

not_an_integer: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.floats() | any_text | st.lists(st.integers()) | st.just({})
)
too_large = st.integers(INT64 + 1)
not_a_text: st.SearchStrategy[object] = st.none() | st.booleans() | numbers | st.lists(any_text) | st.just({})
not_an_array = scalars | st.dictionaries(any_text, scalars)
not_an_object = scalars | st.lists(scalars)
unknown_fields = st.text("xyz", min_size=1, max_size=8)  # too few letters to spell a known one


def without_a_field(value: Json, data: st.DataObject) -> tuple[Json, str]:
    field = data.draw(st.sampled_from(list(value)))
    return {name: inner for name, inner in value.items() if name != field}, field


def with_an_unknown_field(value: Json, data: st.DataObject) -> tuple[Json, str]:
    field = data.draw(unknown_fields)
    return value | {field: data.draw(json_values)}, field


def with_a_wrong_field(value: Json, data: st.DataObject) -> tuple[Json, str]:
    wrong: dict[str, st.SearchStrategy[Any]] = {
        "v": not_an_integer | st.integers().filter(lambda version: version != 1),
        "model": not_a_text | st.just(""),
        "regions": not_an_array,
        "inputs": not_an_object,
        "outputs": not_an_object,
    }
    field = data.draw(st.sampled_from(list(wrong)))
    return value | {field: data.draw(wrong[field])}, field


def with_a_wrong_region(value: Json, data: st.DataObject) -> tuple[Json, str]:
    wrong: dict[str, st.SearchStrategy[Any]] = {
        "kind": not_a_text | any_text.filter(lambda kind: kind != "system"),
        "key": not_a_text,
        "byte_size": not_an_integer | st.integers(max_value=0) | too_large,
        "token": not_a_text | any_text | tokens.map(lambda token: token + "0") | tokens.map(lambda token: token[1:]),
        "slot": not_an_integer | st.integers(max_value=-1) | too_large,
    }
    index = data.draw(st.integers(0, len(value["regions"]) - 1))
    region = value["regions"][index]
    field = data.draw(st.sampled_from(list(wrong)))
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "replace":
        region[field] = data.draw(wrong[field])
    elif change == "remove":
        del region[field]
    else:
        field = data.draw(unknown_fields)
        region[field] = data.draw(json_values)
    return value, f"regions[{index}].{field}"


def with_a_wrong_span(value: Json, data: st.DataObject) -> tuple[Json, str]:
    wrong: list[st.SearchStrategy[Any]] = [
        not_an_integer | st.integers(max_value=-1) | st.integers(len(value["regions"])),
        not_an_integer | st.integers(max_value=-1) | too_large,
        not_an_integer | st.integers(max_value=-1) | too_large,
        not_a_text | any_text.filter(lambda name: name not in dtypes.BY_NAME),
        not_an_array | st.lists(st.integers(max_value=-1) | not_an_integer, min_size=1),
    ]
    group = data.draw(st.sampled_from(["inputs", "outputs"]))
    name = data.draw(st.sampled_from(list(value[group])))
    place = data.draw(st.integers(0, len(value[group][name]) - 1))
    value[group][name][place] = data.draw(wrong[place])
    return value, f"{group}.{name}[{place}]"


def with_a_span_of_another_form(value: Json, data: st.DataObject) -> tuple[Json, str]:
    group = data.draw(st.sampled_from(["inputs", "outputs"]))
    name = data.draw(st.sampled_from(list(value[group])))
    length = len(value[group][name])
    value[group][name] = data.draw(not_an_array | st.lists(scalars).filter(lambda entry: len(entry) != length))
    return value, f"{group}.{name}"


def with_a_span_out_of_bounds(value: Json, data: st.DataObject) -> tuple[Json, str]:
    group = data.draw(st.sampled_from(["inputs", "outputs"]))
    name = data.draw(st.sampled_from(list(value[group])))
    span = value[group][name]
    span[1] = data.draw(st.integers(value["regions"][span[0]]["byte_size"] - span[2] + 1, INT64))
    return value, f"{group}.{name}"


def with_an_input_of_another_size(value: Json, data: st.DataObject) -> tuple[Json, str]:
    name = data.draw(st.sampled_from(list(value["inputs"])))
    entry = value["inputs"][name]
    if entry[3] == "BYTES":
        entry[4] = [*data.draw(st.lists(st.integers(1, INT64), max_size=63)), entry[2] // LENGTH_SIZE + 1]
        return value, f"inputs.{name}[2]"
    entry[4] = data.draw(
        st.lists(st.integers(1, INT64), max_size=64).filter(lambda shape: math.prod(shape) != math.prod(entry[4]))
    )
    return value, f"inputs.{name}[2]"


def with_an_output_over_another(value: Json, data: st.DataObject) -> tuple[Json, str]:
    name = data.draw(names.filter(lambda name: name not in value["outputs"]))
    region = data.draw(st.integers(0, len(value["regions"]) - 1))
    size = value["regions"][region]["byte_size"]
    value["outputs"] = {name: [region, 0, size]}
    value["inputs"] = {"EVERYTHING": [region, 0, size, "UINT8", [size]]}
    return value, f"outputs.{name}"


BREAKING_CHANGES: tuple[Change, ...] = (
    without_a_field,
    with_an_unknown_field,
    with_a_wrong_field,
    with_a_wrong_region,
    with_a_wrong_span,
    with_a_span_of_another_form,
    with_a_span_out_of_bounds,
    with_an_input_of_another_size,
    with_an_output_over_another,
)
