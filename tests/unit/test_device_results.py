"""What a client makes of results that speak of GPUs: outputs there, and events to wait for. Any process may have
written them.
"""

from __future__ import annotations

import base64
import json
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.result import Result, result_of
from shm_backend_utils.client.space import DeviceSpace, HostSpace, Space
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.cuda.events import Event, EventListener
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH
from shm_backend_utils.protocol.results import parse_events, parse_results
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import runtime_that_gives_all_back

HOST_SIZE, DEVICE_SIZE = 8192, 4096
DEVICE = 1
ON_HOST = ["FP32", [2, 3], 24, 0, 4096]
ON_GPU = ["FP32", [2, 3], 24, 1, 1024]
UUID = "0123456789abcdef" * 2
HANDLE = bytes(range(HANDLE_LENGTH))
TEXT = base64.b64encode(HANDLE).decode()
OUTPUT = ["FP32", [1], 4, 0, 0]


class Response:
    """A server's reply, as tritonclient has it; with some outputs of its own."""

    def __init__(self, **outputs: npt.NDArray[Any]) -> None:
        self._outputs = outputs

    def as_numpy(self, name: str) -> npt.NDArray[Any] | None:
        return self._outputs.get(name)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def allocation(cuda: FakeCuda) -> Iterator[CudaAllocation]:
    """What the call has on a GPU; its bytes count from 0 to 255, again and again."""
    allocation = CudaAllocation(cuda, DEVICE_SIZE, DEVICE)
    array = allocation.array_at(0, np.dtype(np.uint8), (DEVICE_SIZE,), DEVICE_SIZE)
    assert array is not None
    array.peek()[:] = np.arange(DEVICE_SIZE).astype(np.uint8)
    del array
    yield allocation
    allocation.free()


def host_memory() -> npt.NDArray[np.uint8]:
    return np.arange(HOST_SIZE).astype(np.uint8)


def read(
    results: object,
    allocation: CudaAllocation,
    memory: npt.NDArray[np.uint8] | None = None,
    response: Response | None = None,
) -> Result:
    """Return the result of a call that has memory on the host and on a GPU."""
    spaces: list[Space] = [
        HostSpace(0, HOST_SIZE),
        DeviceSpace(allocation, EventListener(allocation.runtime)),
    ]
    places = parse_results(json.dumps(results).encode(), [space.byte_size for space in spaces])
    return result_of(places, spaces, host_memory() if memory is None else memory, response or Response())


# Outputs


def test_an_output_is_where_the_model_wrote_it(allocation: CudaAllocation) -> None:
    result = read({"X": ON_GPU, "Y": ON_HOST}, allocation)
    x: Any = result["X"]
    assert (x.address - allocation.address, x.device, x.shape, x.dtype) == (1024, DEVICE, (2, 3), np.dtype(np.float32))
    assert x.get().tobytes() == bytes(range(24))
    assert result["Y"].tobytes() == bytes(range(24))
    assert result.bytes_avoided == 48


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in dtypes.BY_NAME.values() if dtype.itemsize], ids=lambda row: row.name
)
def test_an_output_on_a_gpu_may_be_of_any_type(allocation: CudaAllocation, dtype: dtypes.DType) -> None:
    array = read({"X": [dtype.name, [2], 2 * dtype.itemsize, 1, 0]}, allocation)["X"]
    assert (array.dtype, array.shape) == (dtype.numpy, (2,))


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"), [([], 4, 0), ([1], 4, DEVICE_SIZE - 4), ([1024], DEVICE_SIZE, 0), ([0, 5], 0, 0)]
)
def test_an_output_may_lie_anywhere_in_its_own_memory(
    allocation: CudaAllocation, shape: list[int], byte_size: int, offset: int
) -> None:
    array: Any = read({"X": ["FP32", shape, byte_size, 1, offset]}, allocation)["X"]
    assert (array.address - allocation.address, array.nbytes) == (offset, byte_size)


@pytest.mark.parametrize(
    ("region", "offset"), [(1, DEVICE_SIZE - 23), (1, HOST_SIZE - 24), (0, HOST_SIZE - 23), (2, 0), (-1, 0)]
)
def test_an_output_outside_its_own_memory_is_the_peers_fault(
    allocation: CudaAllocation, region: int, offset: int
) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        read({"X": ["FP32", [2, 3], 24, region, offset]}, allocation)


def test_an_output_for_which_the_gpu_had_no_room_is_taken_from_the_response(allocation: CudaAllocation) -> None:
    labels = np.array([1, 2], np.int64)
    result = read({"X": ON_GPU, "LABELS": None}, allocation, response=Response(LABELS=labels))
    assert result["LABELS"] is labels
    assert (result.overflowed, result.bytes_avoided) == ({"LABELS": 16}, 24)


def test_an_array_on_a_gpu_holds_the_call_memory_until_it_dies(allocation: CudaAllocation) -> None:
    memory = host_memory()
    is_held = weakref.ref(memory)
    result = read({"X": ON_GPU}, allocation, memory)
    part: Any = result["X"]
    part = part[1:, :2]
    del memory
    result.release()
    assert is_held() is not None
    assert part.get().size == 2
    del part
    assert is_held() is None


def test_memory_that_no_gpu_output_is_in_is_not_held(allocation: CudaAllocation) -> None:
    memory = host_memory()
    is_held = weakref.ref(memory)
    result = read({"LABELS": None}, allocation, memory, Response(LABELS=np.zeros(1)))
    del memory
    assert is_held() is None
    assert len(result) == 1


# Events


def events_of(events: object, **outputs: object) -> tuple[Event, ...]:
    return parse_events(json.dumps({**outputs, "": events}).encode())


@pytest.mark.parametrize("results", [b"", b"{}", json.dumps({"Y": OUTPUT, "Z": None}).encode()], ids=str)
def test_results_without_the_member_have_no_events(results: bytes) -> None:
    assert parse_events(results) == ()


def test_events_are_read_in_their_order() -> None:
    other = base64.b64encode(HANDLE[::-1]).decode()
    assert events_of([[UUID, TEXT], ["f" * 32, other]], Y=OUTPUT) == (
        Event(UUID, HANDLE),
        Event("f" * 32, HANDLE[::-1]),
    )


def test_there_may_be_no_event_in_the_member() -> None:
    assert events_of([], Y=OUTPUT) == ()


@pytest.mark.parametrize("member", ['"":', '"" :', '""\n\t:', '"": '], ids=repr)
def test_events_are_found_however_the_text_is_spaced(member: str) -> None:
    text = f'{{"Y":{json.dumps(OUTPUT)},{member}{json.dumps([[UUID, TEXT]])}}}'
    assert parse_events(text.encode()) == (Event(UUID, HANDLE),)


@pytest.mark.parametrize("name", ['Y"', '""', '"":', '\\"":', ":", " "])
def test_no_name_of_an_output_is_taken_for_the_member(name: str) -> None:
    text = json.dumps({name: OUTPUT}, separators=(",", ":")).encode()
    assert parse_events(text) == ()
    assert [place.name for place in parse_results(text, [4])] == [name]


@pytest.mark.parametrize("events", [[], [[UUID, TEXT]], None, "nonsense"], ids=str)
def test_the_member_is_no_output(events: object) -> None:
    text = json.dumps({"Y": OUTPUT, "": events}).encode()
    assert [place.name for place in parse_results(text, [4])] == ["Y"]


@pytest.mark.parametrize(
    "events",
    [
        *(None, True, 1, 1.5, "", "ab", {}, {"ab": 1}, {UUID: TEXT}),
        *([None], [True], [1], [""], ["ab"], [UUID], [{}], [[]], [[[]]]),
        *([[UUID]], [[TEXT]], [[UUID, TEXT, 0]], [UUID, TEXT], [[UUID, TEXT], None], [[UUID, TEXT], []]),
        *([[None, TEXT]], [[1, TEXT]], [[True, TEXT]], [[[UUID], TEXT]], [[{}, TEXT]], [["", TEXT]]),
        *([[UUID[:-1], TEXT]], [[UUID + "0", TEXT]], [[UUID.upper(), TEXT]], [[TEXT, UUID]]),
        *([[UUID, None]], [[UUID, 64]], [[UUID, [TEXT]]], [[UUID, {}]], [[UUID, ""]], [[UUID, HANDLE.hex()]]),
    ],
    ids=lambda events: json.dumps(events)[:48],
)
def test_a_member_that_is_not_as_the_protocol_says_is_the_peers_fault(events: object) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: .*; is it of the same version?"):
        events_of(events, Y=OUTPUT)


@pytest.mark.parametrize(
    "handle",
    [
        *(TEXT[:-1], TEXT[:-2], TEXT + "=", TEXT + "\n", " " + TEXT, "-" + TEXT[1:], "\0" + TEXT[1:], "é" + TEXT[1:]),
        *(base64.b64encode(other).decode() for other in (b"\1", HANDLE[:-1], HANDLE + b"\0", HANDLE * 20)),
    ],
    ids=lambda handle: ascii(handle)[-24:],
)
def test_a_handle_that_is_no_64_bytes_in_base64_is_the_peers_fault(handle: str) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: ") as caught:
        events_of([[UUID, handle]])
    assert handle not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b'{"":', b'{"":[', b'{"":[]', b'"":', b'["":1]', b'{"":NaN}', b'\xff{"":[]}', b'{"":' + b"[" * 3000],
    ids=lambda text: repr(text[:24]),
)
def test_text_that_is_no_mapping_is_the_peers_fault(text: bytes) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        parse_events(text)
