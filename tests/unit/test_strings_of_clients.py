"""Strings at a client: what users pass as an input, and outputs that models have written as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.inputs.sources import StringSource, sources
from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import PeerError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.results import OutputPlace


def source(value: Any, dims: Sequence[int] = (-1,)) -> StringSource:
    """Return what is made of a value that is passed for an input of strings."""
    tensor = {"name": "X", "data_type": "TYPE_STRING", "dims": dims}
    made = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]
    assert isinstance(made, StringSource)
    return made


def objects(source: StringSource) -> npt.NDArray[np.object_]:
    """Return what travels with a request."""
    target: npt.NDArray[np.object_] = np.empty(source.shape, object)
    source.write_to(target)
    return target


def bytes_of(source: StringSource) -> bytes:
    """Return what is written into shared memory, once it is known that what follows is left alone."""
    target = np.full(source.byte_size + 10, 255, np.uint8)
    source.write_to(target)
    assert (target[source.byte_size :] == 255).all()
    return target[: source.byte_size].tobytes()


@pytest.mark.parametrize(
    ("value", "dims", "expected"),
    [
        (["a", b"bc"], (-1,), b"\x01\0\0\0a\x02\0\0\0bc"),
        ("ü", (1, 1), b"\x02\0\0\0\xc3\xbc"),
        (["", b"\0"], (-1,), b"\0\0\0\0\x01\0\0\0\0"),
        ([], (-1,), b""),
        (np.empty((0, 3), object), (-1, 3), b""),
        (np.array("word", object), (), b"\x04\0\0\0word"),
        (np.array([["a", "x"], ["b", "y"]]).T[:1], (-1, -1), b"\x01\0\0\0a\x01\0\0\0b"),
        ([np.array(["a"]), np.array(["b"])], (-1, 1), b"\x01\0\0\0a\x01\0\0\0b"),
        (np.array(["a", "b"], ">U1"), (-1,), b"\x01\0\0\0a\x01\0\0\0b"),
    ],
    ids=["both", "one", "empty strings", "none", "no rows", "0-d", "transposed", "rows", "big-endian"],
)
def test_strings_are_written_as_lengths_and_bytes(value: Any, dims: tuple[int, ...], expected: bytes) -> None:
    assert bytes_of(source(value, dims)) == expected


@pytest.mark.parametrize("length", [0, 59, 60, 10**6])
def test_strings_need_room_for_their_lengths_and_bytes_and_no_more(length: int) -> None:
    made = source([b"x" * length, "ü"])
    assert made.byte_size == made.encoded.nbytes == 4 + length + 4 + 2
    assert objects(source("word", (1, 1))).tolist() == [["word"]]


REGION = 8192
"""Bytes of the region that the outputs are in."""


WORDS = [b"a", b"", b"\x00\xff\x00"]
ENCODED = b"\x01\x00\x00\x00a\x00\x00\x00\x00\x03\x00\x00\x00\x00\xff\x00"


class Response:
    """A server's reply, as tritonclient has it; with one output of its own, or none."""

    def __init__(self, words: npt.NDArray[Any] | None = None) -> None:
        self._words = words

    def as_numpy(self, name: str) -> npt.NDArray[Any] | None:
        return self._words


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    """A region of ones: every four of them are a length that leads far beyond the end."""
    return np.full(REGION, 1, np.uint8)


def written_by_a_model(memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int], room: int = 0) -> Result:
    """Return the result of a model that has written this at the very end of the region, with room behind it."""
    offset = REGION - len(encoded) - room
    memory[offset : offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
    return read(OutputPlace("WORDS", BYTES, tuple(shape), 0, offset, len(encoded) + room, is_in_response=False), memory)


def overflowed(encoded: bytes, shape: list[int], dtype: Any = np.uint8) -> Result:
    """Return the result of a model whose strings found no room, and came back in the response."""
    response = Response(np.frombuffer(encoded, np.uint8).astype(dtype))
    return read(in_response(shape), np.empty(REGION, np.uint8), response)


def in_response(shape: list[int]) -> OutputPlace:
    return OutputPlace("WORDS", BYTES, tuple(shape), 0, 0, 0, is_in_response=True)


def read(place: OutputPlace, memory: npt.NDArray[np.uint8], response: Response | None = None) -> Result:
    data = bytes(16) + results.encode([place])
    return result_of(results.decode(data, [memory.nbytes]).outputs, memory, (), lambda: response or Response())


@pytest.mark.parametrize("room", [0, 1, 4, 100])
@pytest.mark.parametrize(("encoded", "shape"), [(ENCODED, [3]), (ENCODED, [3, 1]), (ENCODED[:5], []), (b"", [0, 5])])
def test_strings_in_memory_are_an_array_of_bytes(
    memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int], room: int
) -> None:
    result = written_by_a_model(memory, encoded, shape, room)
    memory[:] = 255  # which changes nothing that is read
    array = result["WORDS"]
    assert (array.dtype, array.shape) == (np.dtype(object), tuple(shape))
    assert array.ravel().tolist() == WORDS[: array.size]
    assert {type(word) for word in array.ravel()} <= {bytes}
    assert result.bytes_avoided == len(encoded) + room


# What no reading believes is in tests/unit/test_strings.py; here: that it is the peer's fault, wherever it lies.
LIES = {
    "one more than there are": (ENCODED, [4]),
    "a negative length": (struct.pack("<i", -4) + b"four", [1]),
    "nothing, without dimensions": (b"", []),
    "none, of a shape that no array has": (b"", [0, 2**62, 2**62]),
}


def test_strings_that_found_no_room_are_taken_from_the_response() -> None:
    result = overflowed(ENCODED, [3, 1])
    assert result["WORDS"].tolist() == [[word] for word in WORDS]
    assert (result.overflowed, result.bytes_avoided) == ({"WORDS": len(ENCODED)}, 0)


def test_strings_that_are_neither_in_memory_nor_in_the_response_are_the_peers_fault() -> None:
    with pytest.raises(PeerError, match="break the protocol: WORDS"):
        read(in_response([3]), np.empty(REGION, np.uint8))


@pytest.mark.parametrize("lie", LIES)
def test_strings_that_are_not_what_the_results_say_are_the_peers_fault(memory: npt.NDArray[np.uint8], lie: str) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?"):
        written_by_a_model(memory, *LIES[lie])
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?"):
        overflowed(*LIES[lie])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, object], ids=str)
def test_a_response_that_does_not_carry_strings_as_bytes_is_the_peers_fault(dtype: Any) -> None:
    said = "whose elements are not bytes" if dtype is object else "the model's results break the protocol: "
    with pytest.raises(PeerError, match=said):
        overflowed(ENCODED, [3], dtype)
