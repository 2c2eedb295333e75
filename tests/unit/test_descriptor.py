"""Protocol v1: what a descriptor may say, and how a wrong one is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import DescriptorError
from shm_backend_utils.protocol import descriptor
from shm_backend_utils.protocol.descriptor import Descriptor, InputSpan, OutputSpan, SystemRegionClaim

KEY = "shmbu-4711-5ec7e75ec7e7"
TOKEN = "0123456789abcdef" * 2
REGION_SIZE = 12288


def valid() -> dict[str, Any]:
    """Return a descriptor in JSON's types, free to be broken."""
    return {
        "v": 1,
        "model": "resize",
        "regions": [{"kind": "system", "key": KEY, "byte_size": REGION_SIZE, "token": TOKEN, "slot": 0}],
        "inputs": {"IMAGE": [0, 4096, 24, "FP32", [2, 3]]},
        "outputs": {"OUTPUT0": [0, 8192, 4096]},
    }


def refusal(value: object) -> DescriptorError:
    """Return the error that refuses this descriptor, once it is known to name its field and no secret."""
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(text)
    message = str(caught.value)
    assert f"shm_io.{caught.value.field}" in message or not caught.value.field
    assert KEY not in message
    assert TOKEN not in message
    return caught.value


def test_a_valid_descriptor_is_returned_in_full() -> None:
    assert descriptor.parse(json.dumps(valid())) == Descriptor(
        model="resize",
        regions=(SystemRegionClaim(KEY, REGION_SIZE, TOKEN, slot=0),),
        inputs={"IMAGE": InputSpan(0, 4096, 24, dtypes.BY_NAME["FP32"], (2, 3))},
        outputs={"OUTPUT0": OutputSpan(0, 8192, 4096)},
    )


def test_a_descriptor_may_have_no_regions_and_no_tensors() -> None:
    value = valid() | {"regions": [], "inputs": {}, "outputs": {}}
    assert descriptor.parse(json.dumps(value)) == Descriptor("resize", (), {}, {})


def in_hexadecimal(text: str, encoding: str = "utf-8") -> str:
    return text.encode(encoding).hex()


@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_a_descriptor_may_be_in_hexadecimal_digits(case: Callable[[str], str]) -> None:
    text = json.dumps(valid())
    assert descriptor.parse(case(in_hexadecimal(text))) == descriptor.parse(text)


def test_names_in_hexadecimal_may_have_any_letters() -> None:
    text = json.dumps(valid() | {"model": "größer"}, ensure_ascii=False)
    assert descriptor.parse(in_hexadecimal(text)).model == "größer"


def test_encode_writes_what_the_protocol_shows() -> None:
    assert json.loads(descriptor.encode(descriptor.parse(json.dumps(valid())))) == valid()


def test_a_scalar_input_has_an_empty_shape() -> None:
    value = valid()
    value["inputs"]["IMAGE"] = [0, 4096, 4, "FP32", []]
    assert descriptor.parse(json.dumps(value)).inputs["IMAGE"].shape == ()


@pytest.mark.parametrize("text", ["", "{", "nonsense", "{'v': 1}", '{"v": 1} 2', "\ufeff{}", "\ud800"])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    assert refusal(text).found == "text that is not JSON"


@pytest.mark.parametrize(
    "text",
    [
        in_hexadecimal(""),
        in_hexadecimal("{"),
        in_hexadecimal("nonsense"),
        in_hexadecimal(json.dumps(valid()), "utf-16"),
        in_hexadecimal(json.dumps(valid()))[:-1],
        f"{in_hexadecimal(json.dumps(valid()))} ",
        f"0x{in_hexadecimal(json.dumps(valid()))}",
        "ff7b7d",
    ],
)
def test_hexadecimal_digits_of_something_else_are_refused(text: str) -> None:
    assert refusal(text).found == "text that is not JSON"


def test_what_is_wrong_in_hexadecimal_is_named_as_ever() -> None:
    assert refusal(in_hexadecimal(json.dumps(valid() | {"inputs": []}))).field == "inputs"


def test_the_length_of_hexadecimal_counts_as_it_is_sent() -> None:
    text = in_hexadecimal(json.dumps(valid()).ljust(descriptor.MAX_DESCRIPTOR_LENGTH // 2))
    assert descriptor.parse(text).model == "resize"
    assert refusal(text + in_hexadecimal(" ")).found == f"{len(text) + 2} characters"


@pytest.mark.parametrize("bracket", ["[", '{"v":'])
def test_nesting_in_hexadecimal_that_exceeds_the_interpreters_stack_is_refused(bracket: str) -> None:
    assert refusal(in_hexadecimal(bracket * (8000 // len(bracket)))).found == "text that is not JSON"


@pytest.mark.parametrize("bracket", ["[", '{"v":'])
def test_nesting_that_exceeds_the_interpreters_stack_is_refused(bracket: str) -> None:
    assert refusal(bracket * (8000 // len(bracket))).found == "text that is not JSON"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11, integers of any length were converted")
def test_an_integer_that_python_will_not_convert_is_refused() -> None:
    assert refusal('{"v": ' + "9" * 8000 + "}").found == "text that is not JSON"


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "text", []])
def test_json_that_is_not_an_object_is_refused(value: object) -> None:
    assert refusal(json.dumps(value)).field == ""


@pytest.mark.parametrize("version", [None, True, 0, 2, -1, 1.0, "1", [1], 10**300])
def test_another_version_is_refused(version: object) -> None:
    assert refusal(valid() | {"v": version}).field == "v"


def test_the_version_is_looked_at_before_fields_that_another_version_may_have() -> None:
    assert refusal(valid() | {"v": 2, "added_in_version_2": 1}).field == "v"


@pytest.mark.parametrize("field", ["v", "model", "regions", "inputs", "outputs"])
def test_a_missing_field_is_refused(field: str) -> None:
    value = valid()
    del value[field]
    assert refusal(value).field == field


@pytest.mark.parametrize("field", ["kind", "key", "byte_size", "token", "slot"])
def test_a_missing_field_of_a_region_is_refused(field: str) -> None:
    value = valid()
    del value["regions"][0][field]
    assert refusal(value).field == f"regions[0].{field}"


def test_an_unknown_field_is_refused() -> None:
    assert refusal(valid() | {"extra": 1}).field == "extra"


def test_an_unknown_field_of_a_region_is_refused() -> None:
    value = valid()
    value["regions"][0]["extra"] = 1
    assert refusal(value).field == "regions[0].extra"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("model", ""),
        ("model", None),
        ("model", 1),
        ("regions", None),
        ("regions", {}),
        ("inputs", None),
        ("inputs", []),
        ("outputs", None),
        ("outputs", []),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, wrong: object) -> None:
    assert refusal(valid() | {field: wrong}).field == field


@pytest.mark.parametrize("wrong", [None, 1, "system", []])
def test_a_region_that_is_not_an_object_is_refused(wrong: object) -> None:
    assert refusal(valid() | {"regions": [wrong]}).field == "regions[0]"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("kind", "sealed"),
        ("kind", None),
        ("kind", ["system"]),
        ("key", None),
        ("key", 1),
        ("byte_size", 0),
        ("byte_size", -1),
        ("byte_size", 2**63),
        ("byte_size", 4096.0),
        ("byte_size", True),
        ("byte_size", "4096"),
        ("token", None),
        ("token", ""),
        ("token", TOKEN[:-1]),
        ("token", TOKEN + "0"),
        ("token", TOKEN + "\n"),
        ("token", TOKEN.upper()),
        ("token", TOKEN[:-1] + "\u0661"),
        ("slot", -1),
        ("slot", 2**63),
        ("slot", True),
        ("slot", 0.0),
        ("slot", float("nan")),
    ],
)
def test_a_wrong_value_in_a_region_is_refused(field: str, wrong: object) -> None:
    value = valid()
    value["regions"][0][field] = wrong
    assert refusal(value).field == f"regions[0].{field}"


@pytest.mark.parametrize("group", ["inputs", "outputs"])
@pytest.mark.parametrize("wrong", [None, {}, [], [0], [0, 4096, 24, "FP32"], [0, 4096, 24, "FP32", [2, 3], 1]])
def test_an_entry_of_the_wrong_form_is_refused(group: str, wrong: object) -> None:
    assert refusal(valid() | {group: {"NAME": wrong}}).field == f"{group}.NAME"


@pytest.mark.parametrize("group", ["inputs", "outputs"])
@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, -1),
        (0, 1),
        (0, 2**70),
        (0, False),
        (0, 0.0),
        (0, None),
        (1, -1),
        (1, 2**63),
        (1, "4096"),
        (1, True),
        (1, float("inf")),
        (2, -1),
        (2, 2**63),
        (2, 24.0),
        (2, True),
        (2, [24]),
    ],
)
def test_a_wrong_number_in_a_span_is_refused(group: str, place: int, wrong: object) -> None:
    value = valid()
    (name,) = value[group]
    value[group][name][place] = wrong
    assert refusal(value).field == f"{group}.{name}[{place}]"


@pytest.mark.parametrize("group", ["inputs", "outputs"])
def test_a_span_in_a_descriptor_without_regions_is_refused(group: str) -> None:
    value = valid() | {"regions": []} | {"inputs": {}, "outputs": {}} | {group: valid()[group]}
    (name,) = value[group]
    assert refusal(value).field == f"{group}.{name}[0]"


@pytest.mark.parametrize("wrong", [None, 1, "", "fp32", "TYPE_FP32", "STRING", "TYPE_STRING", "FP8", ["FP32"]])
def test_a_data_type_that_triton_does_not_have_is_refused(wrong: object) -> None:
    value = valid()
    value["inputs"]["IMAGE"][3] = wrong
    assert refusal(value).field == "inputs.IMAGE[3]"


def test_an_input_may_be_bf16() -> None:
    value = valid()
    value["inputs"]["IMAGE"][2:] = [12, "BF16", [2, 3]]
    assert descriptor.parse(json.dumps(value)).inputs["IMAGE"].dtype is dtypes.BF16


@pytest.mark.parametrize(("byte_size", "shape"), [(24, [2, 3]), (25, [2, 3]), (4096, [6]), (4, []), (0, [0]), (9, [0])])
def test_strings_may_have_any_size_that_has_room_for_their_lengths(byte_size: int, shape: list[int]) -> None:
    value = valid() | {"outputs": {}}
    value["inputs"]["WORDS"] = [0, REGION_SIZE - byte_size, byte_size, "BYTES", shape]
    assert descriptor.parse(json.dumps(value)).inputs["WORDS"] == InputSpan(
        0, REGION_SIZE - byte_size, byte_size, dtypes.BYTES, tuple(shape)
    )


@pytest.mark.parametrize("shape", [[2, 3, 2], [7], [2**62, 2], [2**63 - 1] * 64])
def test_strings_that_are_more_than_their_lengths_have_room_are_refused(shape: list[int]) -> None:
    value = valid()
    value["inputs"]["WORDS"] = [0, 4096, 24, "BYTES", shape]
    refused = refusal(value)
    assert refused.field == "inputs.WORDS[2]"
    assert refused.found == "24"
    assert refused.expected.startswith("at least ")
    assert len(str(refused)) < 300


def test_strings_that_end_outside_their_region_are_refused() -> None:
    value = valid()
    value["inputs"]["WORDS"] = [0, REGION_SIZE - 23, 24, "BYTES", [1]]
    assert refusal(value).field == "inputs.WORDS"


def test_an_output_that_overlaps_the_room_behind_strings_is_refused() -> None:
    value = valid()
    value["inputs"]["WORDS"] = [0, 8000, 193, "BYTES", [0]]
    assert refusal(value).field == "outputs.OUTPUT0"


@pytest.mark.parametrize("wrong", [None, 6, "2,3", {}, [2, -3], [2, 3.0], [True, 6], [2**63], [1] * 65])
def test_a_shape_that_is_none_is_refused(wrong: object) -> None:
    value = valid()
    value["inputs"]["IMAGE"][4] = wrong
    assert refusal(value).field == "inputs.IMAGE[4]"


@pytest.mark.parametrize("shape", [[], [2], [2, 3, 1, 2], [0], [2**62, 2**62], [2**63 - 1] * 64])
def test_an_input_whose_size_is_not_that_of_its_shape_is_refused(shape: list[int]) -> None:
    value = valid()
    value["inputs"]["IMAGE"][4] = shape
    assert refusal(value).field == "inputs.IMAGE[2]"


@pytest.mark.parametrize("offset", [REGION_SIZE - 23, REGION_SIZE, 2**63 - 1])
def test_an_input_that_ends_outside_its_region_is_refused(offset: int) -> None:
    value = valid()
    value["inputs"]["IMAGE"][1] = offset
    assert refusal(value).field == "inputs.IMAGE"


@pytest.mark.parametrize(("offset", "byte_size"), [(8192, 4097), (8193, 4096), (1, 2**63 - 1)])
def test_an_output_that_ends_outside_its_region_is_refused(offset: int, byte_size: int) -> None:
    assert refusal(valid() | {"outputs": {"OUTPUT0": [0, offset, byte_size]}}).field == "outputs.OUTPUT0"


def test_a_span_may_end_where_its_region_ends() -> None:
    value = valid() | {"outputs": {"OUTPUT0": [0, REGION_SIZE - 1, 1]}}
    assert descriptor.parse(json.dumps(value)).outputs["OUTPUT0"].offset == REGION_SIZE - 1


@pytest.mark.parametrize("output", [[0, 8192, 1], [0, 12287, 1], [0, 4120, 4073], [0, 0, REGION_SIZE]])
def test_an_output_that_overlaps_an_output_is_refused(output: list[int]) -> None:
    value = valid() | {"inputs": {}}
    value["outputs"]["OTHER"] = output
    assert refusal(value).field in {"outputs.OUTPUT0", "outputs.OTHER"}


@pytest.mark.parametrize("output", [[0, 4096, 24], [0, 4119, 1], [0, 0, 4097], [0, 0, REGION_SIZE], [0, 4100, 4]])
def test_an_output_that_overlaps_an_input_is_refused(output: list[int]) -> None:
    assert refusal(valid() | {"outputs": {"OUTPUT0": output}}).field == "outputs.OUTPUT0"


def test_an_output_that_overlaps_an_input_below_a_longer_input_is_refused() -> None:
    value = valid()
    value["inputs"] = {"LONG": [0, 4096, 100, "UINT8", [100]], "SHORT": [0, 4096, 1, "UINT8", [1]]}
    assert refusal(value | {"outputs": {"OUTPUT0": [0, 4195, 1]}}).field == "outputs.OUTPUT0"


def test_an_output_may_lie_right_beside_other_spans() -> None:
    value = valid() | {"outputs": {"BEFORE": [0, 4095, 1], "AFTER": [0, 4120, 1], "NEXT": [0, 4121, 1]}}
    assert len(descriptor.parse(json.dumps(value)).outputs) == 3


def test_inputs_may_overlap_each_other() -> None:
    value = valid()
    value["inputs"]["SAME"] = value["inputs"]["IMAGE"]
    value["inputs"]["PART"] = [0, 4100, 4, "INT32", [1]]
    assert len(descriptor.parse(json.dumps(value)).inputs) == 3


def test_a_span_without_bytes_overlaps_nothing() -> None:
    value = valid()
    value["inputs"]["EMPTY"] = [0, 9000, 0, "FP32", [0, 3]]
    value["outputs"] |= {"NONE": [0, 4100, 0], "NO_ROOM": [0, 9000, 0]}
    assert len(descriptor.parse(json.dumps(value)).outputs) == 3


def test_spans_in_different_regions_do_not_overlap() -> None:
    value = valid()
    value["regions"].append(value["regions"][0] | {"key": "shmbu-4711-another"})
    value["outputs"]["OTHER"] = [1, 8192, 4096]
    assert len(descriptor.parse(json.dumps(value)).outputs) == 2


def test_a_region_that_is_named_twice_is_refused() -> None:
    value = valid()
    value["regions"].append(dict(value["regions"][0]))
    value["outputs"]["OTHER"] = [1, 8192, 4096]  # the bytes of OUTPUT0
    assert refusal(value).field.startswith("regions[1]")


@pytest.mark.parametrize("group", ["inputs", "outputs"])
def test_a_tensor_without_a_name_is_refused(group: str) -> None:
    value = valid()
    value[group] = {"": next(iter(value[group].values()))}
    assert refusal(value).field.startswith(group)


def test_a_text_of_16_kib_is_parsed() -> None:
    text = json.dumps(valid())
    padded = text + " " * (16 * 1024 - len(text))
    assert descriptor.parse(padded).model == "resize"


def test_a_longer_text_is_refused_unread() -> None:
    text = json.dumps(valid())
    assert refusal(text + " " * (16 * 1024 + 1 - len(text))).expected == "at most 16384"


def test_encode_refuses_a_descriptor_that_would_be_too_long() -> None:
    outputs = {f"OUTPUT{index}": OutputSpan(0, index, 1) for index in range(1000)}
    with pytest.raises(DescriptorError, match="at most 16384"):
        descriptor.encode(Descriptor("model", (), {}, outputs))


def test_a_long_name_is_shortened_in_messages() -> None:
    assert len(str(refusal(valid() | {"x" * 10_000: 1}))) < 300


def test_a_message_can_be_sent_as_utf_8_whatever_a_tensor_is_called() -> None:
    str(refusal(valid() | {"inputs": {"\ud800": None}})).encode()


def test_keys_and_tokens_in_each_others_place_are_not_shown() -> None:
    value = valid()
    value["regions"][0] |= {"key": TOKEN, "token": KEY}
    assert refusal(value).field == "regions[0].token"


@pytest.mark.parametrize("generation", [1, 77, 2**63 - 1])
def test_a_generation_is_returned(generation: int) -> None:
    assert descriptor.check_generation(generation) == generation


@pytest.mark.parametrize("wrong", [None, True, 0, -1, 2**63, 10**300, 1.0, float("nan"), "1", [1], {}])
def test_a_wrong_generation_is_refused_by_the_parameters_name(wrong: object) -> None:
    with pytest.raises(DescriptorError, match="request parameter shm_generation: found .*, expected a 64-bit integer"):
        descriptor.check_generation(wrong)
