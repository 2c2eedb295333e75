"""What a client makes of outputs of strings, which a model has written as bytes. Any process may have written them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import PeerError
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.results import OutputPlace

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


def placed(memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int], room: int = 0) -> Result:
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
    data = bytes(results.results_length(b"")) + results.encode([place])
    return result_of(results.decode(data, [memory.nbytes]).outputs, memory, (), lambda: response or Response())


@pytest.mark.parametrize("room", [0, 1, 4, 100])
@pytest.mark.parametrize(("encoded", "shape"), [(ENCODED, [3]), (ENCODED, [3, 1]), (ENCODED[:5], []), (b"", [0, 5])])
def test_strings_in_memory_are_an_array_of_bytes(
    memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int], room: int
) -> None:
    result = placed(memory, encoded, shape, room)
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
        placed(memory, *LIES[lie])
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?"):
        overflowed(*LIES[lie])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, object], ids=str)
def test_a_response_that_does_not_carry_strings_as_bytes_is_the_peers_fault(dtype: Any) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        overflowed(ENCODED, [3], dtype)


@pytest.mark.parametrize(
    ("region", "offset", "byte_size"),
    [(0, REGION - 16, 17), (0, 0, REGION + 1), (1, 0, 16), (0, REGION, 16), (0, 2**64 - 16, 16), (0, 0, 2**63)],
    ids=str,
)
def test_strings_outside_the_region_are_the_peers_fault(
    memory: npt.NDArray[np.uint8], region: int, offset: int, byte_size: int
) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        read(OutputPlace("WORDS", BYTES, (0,), region, offset, byte_size, is_in_response=False), memory)
