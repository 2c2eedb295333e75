"""Descriptors of named regions, ``shm_io``: what one may say, and how a wrong one is refused."""

from __future__ import annotations

import base64
import functools
import json
import sys
from typing import Any

import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import TableError, VersionError
from shm_backend_utils.protocol import parameters
from shm_backend_utils.protocol.claims import CudaRegionClaim, NamedRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

UUID = "fedcba9876543210" * 2
HANDLE = bytes(range(64))
REGION_SIZE = 12288
NAMED = NamedRegionClaim("pool 1")
CUDA = CudaRegionClaim(HANDLE, REGION_SIZE, UUID, None)
EMPTY: dict[str, Any] = {"regions": [], "inputs": {}, "outputs": {}}
SPANS = [("inputs", "IMAGE"), ("outputs", "OUTPUT0")]


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def in_hexadecimal(text: str, encoding: str = "utf-8") -> str:
    return text.encode(encoding).hex()


def valid() -> dict[str, Any]:
    """Return a descriptor in JSON's types, free to be broken."""
    return {
        "v": 1,
        "model": "resize",
        "regions": [
            {"kind": "cuda", "handle": in_base64(HANDLE), "byte_size": REGION_SIZE, "device_uuid": UUID},
            {"kind": "named", "name": "pool 1"},
        ],
        "inputs": {"IMAGE": [0, 4096, 24, "FP32", [2, 3]]},
        "outputs": {"OUTPUT0": [0, 8192, 4096]},
    }


def parsed(value: object) -> Table:
    model, table = parameters.parse_descriptor(json.dumps(value))
    assert model == "resize"
    return table


def refusal(value: object) -> TableError:
    """Return the error that refuses this descriptor, once it is known to name its field and no secret."""
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(TableError) as caught:
        parameters.parse_descriptor(text)
    message = str(caught.value)
    message.encode()
    assert len(message) < 300
    for secret in (UUID, in_base64(HANDLE), HANDLE.hex(), repr(HANDLE)):
        assert secret not in message
    return caught.value


def test_a_valid_descriptor_is_returned_in_full_and_may_be_in_hexadecimal() -> None:
    assert parsed(valid()) == Table(
        {"IMAGE": InputSpan(dtypes.BY_NAME["FP32"], (2, 3), 1, 4096, 24)},
        {"OUTPUT0": OutputSpan(1, 8192, 4096)},
        (CUDA, NAMED),
    )
    assert json.loads(parameters.encode_descriptor("resize", parsed(valid()))) == valid()
    assert parsed(valid() | EMPTY) == Table({}, {})
    for text in (json.dumps(valid()), json.dumps(valid(), indent=8)):
        for digits in (in_hexadecimal(text), in_hexadecimal(text).upper()):
            assert parameters.parse_descriptor(digits) == parameters.parse_descriptor(text)
    far = parsed(valid() | {"outputs": {"Y": [1, 2**62, 2**62 - 1]}}).outputs
    assert far["Y"] == OutputSpan(2, 2**62, 2**62 - 1), "how large a named region is only the server knows"


NO_JSON = ["", "{", "nonsense", "{'v': 1}", '{"v": 1} 2', "[" * 8000, '{"v":' * 1600]
if sys.version_info >= (3, 11):  # before, integers of any length were converted
    NO_JSON.append('{"v": ' + "9" * 8000 + "}")


@pytest.mark.parametrize(
    "text",
    [
        *(*NO_JSON, "\ufeff{}", "\ud800", "dé"),
        *map(in_hexadecimal, NO_JSON),
        in_hexadecimal(json.dumps(valid()), "utf-16"),
        in_hexadecimal(json.dumps(valid()))[:-1],
        f"{in_hexadecimal(json.dumps(valid()))} ",
        f"0x{in_hexadecimal(json.dumps(valid()))}",
        "ff7b7d",
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_text_that_is_not_json_is_refused_in_hexadecimal_too(text: str) -> None:
    assert refusal(text).found == "text that is not JSON"
    wrong: list[object] = [None, 1, {}]
    for value in wrong:
        with pytest.raises(TableError, match="shm_io: found a value of type .*, expected a string"):
            parameters.parse_descriptor(value)


def test_a_text_of_16_kib_is_parsed_and_a_longer_one_is_neither_read_nor_written() -> None:
    text = json.dumps(valid()).ljust(16 * 1024)
    digits = in_hexadecimal(json.dumps(valid()).ljust(8 * 1024))  # which count as they are sent
    for sent, more in ((text, " "), (digits, in_hexadecimal(" "))):
        assert parameters.parse_descriptor(sent)[0] == "resize"
        error = refusal(sent + more)
        assert (error.found, error.expected) == (f"{len(sent + more)} characters", "at most 16384")
    outputs = {f"OUTPUT{index}": OutputSpan(1, index, 1) for index in range(1000)}
    with pytest.raises(TableError, match="at most 16384"):
        parameters.encode_descriptor("model", Table({}, outputs, (NAMED,)))


LEFT_OUT = object()


def broken(path: tuple[Any, ...], wrong: object) -> dict[str, Any]:
    value: dict[str, Any] = valid()
    *way, last = path
    place: Any = functools.reduce(lambda inner, step: inner[step], way, value)
    place[last] = wrong
    if wrong is LEFT_OUT:
        del place[last]
    return value


NO_COUNT = [-1, 2**63, "4096", True, 24.0, float("inf"), None, [24]]
WRONG: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("v",), [LEFT_OUT, None, True, 0, 2, -1, 1.0, "1", [1], 10**300]),
    (("model",), [LEFT_OUT, "", None, 1]),
    *(((group,), [LEFT_OUT, None, []]) for group in ("inputs", "outputs")),
    (("regions",), [LEFT_OUT, None, {}]),
    (("regions", 0), [None, 1, "named", []]),
    (("regions", 0, "kind"), [LEFT_OUT, "CUDA", "sealed", "", None, 2, True, ["cuda"], {"cuda": 1}]),
    (("regions", 0, "byte_size"), [LEFT_OUT, 0, -1, 2**63, 10**300, 4096.0, True, "4096", float("nan"), None, []]),
    (("regions", 0, "device_uuid"), [LEFT_OUT, "", UUID[:-1], UUID + "0", UUID + "\n", UUID.upper(), "g" * 32, 1]),
    (("regions", 0, "handle"), [LEFT_OUT, None, 64, [], "", in_base64(HANDLE[:-1]), in_base64(HANDLE * 100)]),
    (("regions", 0, "handle"), [letter + in_base64(HANDLE)[1:] for letter in (" ", "-", "_", "\0", "é", "\ud800")]),
    (("regions", 0, "handle"), [in_base64(HANDLE) + letter for letter in ("=", "\n", "A")]),
    (("regions", 1, "kind"), [LEFT_OUT]),
    (("regions", 1, "name"), [LEFT_OUT, "", None, 1, ["pool 1"]]),
    *((("regions", 0, unknown), [1]) for unknown in ("slot_region", "key", "")),
    *((("regions", 1, unknown), [1]) for unknown in ("token", "offset")),
    (("inputs", "IMAGE"), [None, {}, [], [0], [0, 4096, 24, "FP32"], [0, 4096, 24, "FP32", [2, 3], 1]]),
    (("outputs", "OUTPUT0"), [None, {}, [], [0], [0, 4096, 24, "FP32"]]),
    *(((group, name, 0), [-1, 2, 2**70, False, 0.0, None]) for group, name in SPANS),
    *(((group, name, place), NO_COUNT) for group, name in SPANS for place in (1, 2)),
    (("inputs", "IMAGE", 3), [None, 1, "", "fp32", "TYPE_FP32", "STRING", "FP8", ["FP32"], "x" * 9999]),
    (("inputs", "IMAGE", 4), [None, 6, "2,3", {}, [2, -3], [2, 3.0], [True, 6], [2**63], [1] * 33]),
]


@pytest.mark.parametrize(("path", "values"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_or_left_out_is_named(path: tuple[Any, ...], values: list[Any]) -> None:
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    for wrong in values:
        assert refusal(broken(path, wrong)).field == f"shm_io{field}", wrong


@pytest.mark.parametrize("kind", ["system", "lent"])
def test_managed_regions_are_those_of_an_older_client(kind: str) -> None:
    value = valid()
    value["regions"].append({"kind": kind, "key": "shmbu-1", "byte_size": 1, "token": "0" * 32, "slot": 0})
    error = refusal(value)
    assert isinstance(error, VersionError)
    assert (error.code, error.found) == ("shm:version", "1")
    assert error.expected.startswith("2, ")


CUDA_REGION, POOL_REGION = valid()["regions"]
AGAIN = {**CUDA_REGION, "handle": in_base64(HANDLE)[:-3] + "x=="}  # the last bits before padding count for nothing


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"v": 3, "added_in_another_version": 1}, "shm_io.v"),
        *(({"regions": [CUDA_REGION, POOL_REGION, twice]}, "shm_io.regions[2]") for twice in valid()["regions"]),
        ({"regions": [CUDA_REGION, POOL_REGION, AGAIN]}, "shm_io.regions[2]"),
        *(({**EMPTY, group: valid()[group]}, f"shm_io.{group}.{name}[0]") for group, name in SPANS),
        *(({group: {"": valid()[group][name]}}, f"shm_io.{group}") for group, name in SPANS),
        ({"inputs": {"IMAGE": [0, 4096, 24, "FP32", [2]]}}, "shm_io.inputs.IMAGE.byte_size"),
        ({"inputs": {"IMAGE": [0, 4096, 0, "FP32", [0, 2**62, 2**62]]}}, "shm_io.inputs.IMAGE.shape"),
        ({"inputs": {"IMAGE": [0, REGION_SIZE - 20, 24, "FP32", [2, 3]]}}, "shm_io.inputs.IMAGE"),
        ({"outputs": {"OUTPUT0": [0, 8192, 4097]}}, "shm_io.outputs.OUTPUT0"),
        ({"outputs": {"OUTPUT0": [0, 4119, 1]}}, "outputs.OUTPUT0"),  # it overlaps the input
    ],
)
def test_what_contradicts_something_else_is_named_in_hexadecimal_too(changes: dict[str, Any], field: str) -> None:
    assert refusal(valid() | changes).field == field
    assert refusal(in_hexadecimal(json.dumps(valid() | changes))).field == field


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        *(({extra: 1}, "an unknown field") for extra in ("extra", "ring", "x" * 10_000, "\ud800")),
        *(({"inputs": value}, "a number") for value in (1, 2.5, 2**255)),
        *(({"inputs": None}, "null or nothing"), ({"inputs": True}, "a boolean"), ({"inputs": ""}, "an empty string")),
        *(({"inputs": "secret"}, "another string"), ({"inputs": [1]}, "another array")),
    ],
    ids=range(12),
)
def test_a_message_tells_the_kind_of_what_was_found_and_not_what_it_is(changes: dict[str, Any], found: str) -> None:
    assert refusal(valid() | changes).found == found
    error = refusal(valid() | {"outputs": {"Y": [2, 0, 0]}})
    assert (error.found, error.expected) == ("2", "an integer from 0 to 1"), "bounds, and numbers that are short, do"
    assert refusal(valid() | {"outputs": {"Y": [0, -1, 0]}}).expected == "a 64-bit integer of 0 or more"
    nothing = refusal(valid() | EMPTY | {"outputs": {"Y": [0, 0, 0]}})
    assert (nothing.found, nothing.expected) == ("0", "no tensors, as regions is empty")


def test_a_message_can_be_sent_and_shown_whatever_a_tensor_is_called() -> None:
    for name in ("\ud800", "x" * 5000, "\x1b[31m"):
        refusal(valid() | {"inputs": {name: None}})
        refusal(valid() | {"outputs": {name: [0, 4096, 24]}})
