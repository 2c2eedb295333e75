"""What a client makes of the results that a model has written beside its outputs. Any process may have written them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.result import Result, result_of
from shm_backend_utils.client.space import HostSpace
from shm_backend_utils.errors import ClosedError, PeerError
from shm_backend_utils.protocol.region_layout import MAX_RESULTS_LENGTH
from shm_backend_utils.protocol.results import parse_results

REGION = 8192
"""Bytes of the region that the outputs are in."""
SHAPE = [2, 3]
FITTING = ["FP32", SHAPE, 24, 0, 4096]


class Response:
    """A server's reply, as tritonclient has it; with some outputs of its own."""

    def __init__(self, **outputs: npt.NDArray[Any]) -> None:
        self._outputs = outputs

    def as_numpy(self, name: str) -> npt.NDArray[Any] | None:
        return self._outputs.get(name)


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    """A region whose bytes count from 0 to 255, again and again."""
    return np.arange(REGION).astype(np.uint8)


def read(results: object, memory: npt.NDArray[np.uint8], response: Response | None = None) -> Result:
    """Return the result of a call after which the slot's record holds this text, or this as JSON."""
    text = results if isinstance(results, bytes) else json.dumps(results).encode()
    return result_of(
        parse_results(text, [memory.nbytes]), [HostSpace(0, memory.nbytes)], memory, response or Response()
    )


NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]


@pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
def test_an_output_is_a_view_of_the_memory_that_the_model_wrote(
    memory: npt.NDArray[np.uint8], dtype: dtypes.DType
) -> None:
    memory[:] = 0
    array = read({"Y": [dtype.name, SHAPE, 6 * dtype.itemsize, 0, 4096]}, memory)["Y"]
    assert (array.dtype, array.shape) == (dtype.numpy, (2, 3))
    memory[4096 + 5 * dtype.itemsize :] = 1
    assert np.flatnonzero(array).tolist() == [5]


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [([], 4, 0), ([1], 4, REGION - 4), ([0], 0, REGION), ([0, 5], 0, 0), ([REGION // 4], REGION, 0), ([1], 4, 3)],
    ids=["one number", "the last bytes", "nothing at the end", "nothing", "the whole region", "unaligned"],
)
def test_an_output_may_lie_anywhere_in_the_region(
    memory: npt.NDArray[np.uint8], shape: list[int], byte_size: int, offset: int
) -> None:
    array = read({"Y": ["FP32", shape, byte_size, 0, offset]}, memory)["Y"]
    assert array.shape == tuple(shape)
    assert array.tobytes() == memory[offset : offset + byte_size].tobytes()


def test_an_output_that_found_no_room_is_taken_from_the_response(memory: npt.NDArray[np.uint8]) -> None:
    labels = np.array([1, 2], np.int64)
    result = read({"Y": FITTING, "LABELS": None}, memory, Response(LABELS=labels))
    assert result["LABELS"] is labels
    assert result.overflowed == {"LABELS": 16}


def test_bytes_that_the_response_carried_were_not_avoided(memory: npt.NDArray[np.uint8]) -> None:
    places = parse_results(json.dumps({"Y": FITTING, "LABELS": None}).encode(), [memory.nbytes])
    result = result_of(places, [HostSpace(0, memory.nbytes)], memory, Response(LABELS=np.zeros(2)), input_size=100)
    assert result.bytes_avoided == 100 + 24


def test_an_output_that_is_neither_in_memory_nor_in_the_response_is_the_peers_fault(
    memory: npt.NDArray[np.uint8],
) -> None:
    with pytest.raises(PeerError, match="break the protocol: LABELS; is it of the same version?"):
        read({"LABELS": None}, memory)


def test_without_outputs_the_result_is_empty(memory: npt.NDArray[np.uint8]) -> None:
    assert dict(read({}, memory)) == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00",
        b"\xff",
        b"\xff\xfe{",
        b"{",
        b'{"Y": ["FP32", [2, 3], 24, 0, 40',
        b"null",
        b"1",
        b'"Y"',
        b"[]",
        b'{"Y": [NaN, [1], 4, 0, 0]}',
        b'{"Y": ["FP32", [Infinity], 4, 0, 0]}',
        b'{"Y": ["FP32", [1], 1e999, 0, 0]}',
        b"[" * MAX_RESULTS_LENGTH,
        b'{"Y":' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_text_that_is_no_mapping_in_json_is_the_peers_fault(memory: npt.NDArray[np.uint8], text: bytes) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        read(text, memory)


def broken(index: int, *found: Any) -> list[list[Any]]:
    """Return entries of an output with one field changed, to each of these."""
    return [[*FITTING[:index], one, *FITTING[index + 1 :]] for one in found]


@pytest.mark.parametrize(
    "entry",
    [
        *(False, True, 1, 1.5, "", "FP32", "short", {}, [], FITTING[:4], [*FITTING, 0]),
        *broken(0, None, 1, "", "fp32", "TYPE_FP32", "BF16", ["FP32"], {}),
        *(FITTING[:2], FITTING[:1], ["BYTES"], ["BYTES", None], ["BYTES", SHAPE, 24], ["BYTES", SHAPE, 24, 0]),
        *broken(1, None, 6, 6.0, "23", [6.0], [True, 6], ["6"], [None], [[2, 3]], {"2": 3}),
        *broken(1, [-2, -3], [-6, -1], [2], [2, 4], [2**70, 0, 3], []),
        *broken(2, None, 0, 23, 25, 24.0, "24", True, -24, 2**70),
        *broken(3, None, 1, -1, "0", [], 2**70),
        *broken(4, None, -1, -4096, 4096.0, "4096", True, REGION - 23, REGION, 2**63, 2**70),
    ],
    ids=str,
)
def test_an_entry_that_is_not_as_the_protocol_says_is_the_peers_fault(
    memory: npt.NDArray[np.uint8], entry: Any
) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?"):
        read({"Y": entry}, memory)


@pytest.mark.parametrize(
    "shape", [[0, 2**62], [2**70, 0], [2**62, 2**62, 0]], ids=["too large", "no size", "too large together"]
)
def test_an_empty_output_of_a_shape_that_no_array_has_is_the_peers_fault(
    memory: npt.NDArray[np.uint8], shape: list[int]
) -> None:
    with pytest.raises(PeerError):
        read({"Y": ["FP32", shape, 0, 0, 0]}, memory)


def test_an_output_of_more_dimensions_than_an_array_has_is_the_peers_fault(memory: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(PeerError):
        read({"Y": ["FP32", [1] * 100, 4, 0, 0]}, memory)


def test_one_broken_output_spoils_the_whole_result(memory: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(PeerError):
        read({"Y": FITTING, "Z": [*FITTING[:4], REGION]}, memory)


def test_the_message_says_what_was_found(memory: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(PeerError, match="'FP99'"):
        read({"Y": ["FP99", *FITTING[1:]]}, memory)
    with pytest.raises(PeerError, match="a span of 24 bytes that is not the call's"):
        read({"Y": [*FITTING[:4], REGION]}, memory)


def test_a_copy_holds_no_memory_of_the_region(memory: npt.NDArray[np.uint8]) -> None:
    result = read({"Y": FITTING}, memory)
    copied = result.copy()["Y"]
    expected = copied.tobytes()
    memory[:] = 0
    assert copied.tobytes() == expected != result["Y"].tobytes()


def test_an_array_that_was_taken_out_outlives_the_release(memory: npt.NDArray[np.uint8]) -> None:
    result = read({"Y": FITTING}, memory)
    array = result["Y"]
    result.release()
    result.release()
    assert array.tobytes() == memory[4096 : 4096 + 24].tobytes()


@pytest.mark.parametrize(
    "use",
    [lambda result: result["Y"], len, list, lambda result: result.copy()],
    ids=["item", "len", "list", "copy"],
)
def test_a_result_that_was_released_cannot_be_used(memory: npt.NDArray[np.uint8], use: Any) -> None:
    with read({"Y": FITTING}, memory) as result:
        use(result)
    with pytest.raises(ClosedError, match="this result is closed"):
        use(result)


def test_a_result_shows_its_path_and_shapes_and_that_it_was_released(memory: npt.NDArray[np.uint8]) -> None:
    result = read({"Y": FITTING}, memory)
    assert repr(result) == "<Result path=direct {'Y': (2, 3)}>"
    result.release()
    assert repr(result) == "<Result released>"
