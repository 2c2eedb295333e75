"""What a client makes of the results that a model has written beside its outputs: arrays over the slot's memory."""

from __future__ import annotations

import functools
import itertools
import math
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.paths.on_gpus import GpuBuffer
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import PeerError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.results import OutputPlace, check_output
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of
from tests.unit.gpu.fakes import DRIVER

HOST_SIZE, DEVICE_SIZE, DEVICE = 8192, 4096, 1
FP32, INT64 = BY_NAME["FP32"], BY_NAME["INT64"]
ON_HOST = OutputPlace("Y", FP32, (2, 3), 0, 4096, 24, False)
ON_GPU = OutputPlace("X", FP32, (2, 3), 1, 1024, 24, False)
LABELS = OutputPlace("LABELS", INT64, (2,), 0, 0, 0, True)
NUMBERS = [dtype for dtype in BY_NAME.values() if dtype is not dtypes.BYTES]


class Response:
    """A server's reply, as tritonclient has it; with some outputs of its own."""

    def __init__(self, **outputs: npt.NDArray[Any]) -> None:
        self._outputs = outputs

    def as_numpy(self, name: str) -> npt.NDArray[Any] | None:
        return self._outputs.get(name)


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    """A region whose bytes count from 0 to 255, again and again."""
    return np.arange(HOST_SIZE).astype(np.uint8)


@pytest.fixture
def gpu(cuda: CudaRuntime) -> Iterator[GpuBuffer]:
    """What the call has on a GPU; its bytes count from 0 to 255, again and again."""
    allocation = CudaAllocation(cuda, DEVICE_SIZE, DEVICE)
    DRIVER.memory(allocation.address, (DEVICE_SIZE,), np.uint8)[:] = np.arange(DEVICE_SIZE).astype(np.uint8)
    memory = GpuBuffer(cuda, allocation.address, DEVICE_SIZE, DEVICE, allocation.keeper, None)
    yield memory
    memory._keeper = None
    allocation.free()


def read(
    places: Sequence[OutputPlace],
    memory: npt.NDArray[np.uint8],
    response: Response | None = None,
    devices: Sequence[GpuBuffer] = (),
    bytes_avoided: int = 0,
) -> Result:
    record = (bytes(16) + results.encode(places)).ljust(4096, b"\0")
    sizes = [memory.nbytes, *[each.byte_size for each in devices]]
    found = results.decode(record, sizes)
    return result_of(found.outputs, memory, devices, lambda: response or Response(), bytes_avoided)


@pytest.mark.parametrize(
    ("second", "are_apart"), [((4096, 6), False), ((4104, 4), False), ((4120, 6), True), ((4096, 0), True)]
)
def test_outputs_never_share_memory(memory: npt.NDArray[np.uint8], second: tuple[int, int], are_apart: bool) -> None:
    spans = {"A": (4096, 6), "B": second}
    places = [OutputPlace(name, FP32, (size,), 0, at, 4 * size, False) for name, (at, size) in spans.items()]
    result = read(places, memory)
    copied = result.copy()
    expected = {name: memory[at : at + 4 * size].view(np.float32).copy() for name, (at, size) in spans.items()}
    result["A"][:] = 0
    assert (result["B"] == expected["B"]).all()
    assert np.shares_memory(result["B"], memory) is (are_apart and second[1] > 0)
    memory[:] = 0
    assert all((copied[name] == expected[name]).all() for name in spans)


@pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
def test_an_output_is_where_it_was_written(memory: npt.NDArray[np.uint8], gpu: GpuBuffer, dtype: dtypes.DType) -> None:
    size = 6 * dtype.itemsize
    for offset in (0, 1024, DEVICE_SIZE - size):
        result = read([OutputPlace("X", dtype, (2, 3), 1, offset, size, False), ON_HOST], memory, devices=[gpu])
        x: Any = result["X"]
        assert (x.address - gpu.address, x.device, x.shape, x.dtype) == (offset, DEVICE, (2, 3), dtype.numpy)
        assert x.to_host().tobytes() == (np.arange(offset, offset + size) % 256).astype(np.uint8).tobytes()
        assert result["Y"].tobytes() == bytes(range(24))
        assert result.bytes_avoided == 24 + size
    one: Any = read([ON_GPU, ON_GPU._replace(name="Y")], memory, devices=[gpu])
    assert one["X"].address == one["Y"].address == gpu.address + 1024, "one memory is left so on a GPU"


def test_strings_on_a_gpu_and_no_output_are_the_peers_fault(memory: npt.NDArray[np.uint8], gpu: GpuBuffer) -> None:
    with pytest.raises(PeerError, match="X, which are strings, on a GPU"):
        read([OutputPlace("X", dtypes.BYTES, (1,), 1, 1024, 24, False)], memory, devices=[gpu])
    with pytest.raises(PeerError, match="break the protocol: LABELS, which the response lacks"):
        read([LABELS], memory)


def test_an_array_on_a_gpu_holds_the_call_memory_until_it_dies(gpu: GpuBuffer) -> None:
    memory = np.zeros(HOST_SIZE, np.uint8)
    is_held = weakref.ref(memory)
    result = read([ON_GPU], memory, devices=[gpu])
    part: Any = result["X"]
    part = part[1:]
    del memory
    result.release()
    assert is_held() is not None
    assert part.to_host().size == 3
    del part
    assert is_held() is None
    memory = np.zeros(HOST_SIZE, np.uint8)
    is_held = weakref.ref(memory)
    result = read([LABELS], memory, Response(LABELS=np.zeros(2, np.int64)), [gpu])
    del memory
    assert (is_held(), len(result)) == (None, 1), "no output is in it"


@pytest.mark.parametrize("dtype", [FP32, INT64])
@pytest.mark.parametrize("dims", [[], [-1], [3], [-1, -1], [3, -1], [-1, 3], [3, 3]], ids=str)
def test_places_are_checked_as_outputs_in_a_response_are(dims: list[int], dtype: dtypes.DType) -> None:
    spec = ModelSpec.from_config({"name": "m", "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": dims}]})

    def refusal(check: Callable[..., Any], *arguments: Any) -> object:
        try:
            return check(*arguments) and None
        except PeerError as error:
            return str(error)

    for shape in itertools.chain.from_iterable(itertools.product((2, 3), repeat=rank) for rank in range(4)):
        place = OutputPlace("Y", dtype, shape, 0, 0, math.prod(shape) * dtype.itemsize, False)
        record = (bytes(16) + results.encode([place])).ljust(4096, b"\0")
        in_response = refusal(check_output, spec, "Y", dtype, shape)
        assert refusal(results.decode, record, [4096], 0, spec, 0) == in_response


X = np.ones(16, np.float32)


def test_a_call_that_may_be_batched_may_lie_in_a_part_of_a_region() -> None:
    batched = config("rows", max_batch_size=8, dynamic_batching={})
    with FakeServer(config("m"), batched) as server, client_of(server, inline_bytes=0) as client:
        kept = [client.infer("m", {"IN0": number * X}, outputs={"OUT0": X.nbytes}) for number in range(12)]
        kept.pop()
        np.testing.assert_array_equal(client.infer("rows", {"IN0": [X]}, outputs={"OUT0": X.nbytes})["OUT0"], [2 * X])
        assert [each["OUT0"][0] for each in kept] == list(range(0, 22, 2))


def test_an_empty_output_has_no_place_in_registered_memory_and_no_output_can_be_replaced(server: FakeServer) -> None:
    with client_of(server, path="triton-shm") as client:
        result = client.infer("m", {"IN0": X[:0]}, outputs={"OUT0": 0})
        assert result["OUT0"].shape == (0,)
        assert server.orders[-1].outputs == {"OUT0": None}
        with pytest.raises(TypeError) as error:
            result["OUT0"] = X
    assert str(error.value) == "output 'OUT0' cannot be replaced; write result['OUT0'][...] = array"


def test_what_lies_in_inputs_that_other_responses_have_too_is_copied(memory: npt.NDArray[np.uint8]) -> None:
    passed_on = OutputPlace("Y", FP32, (6,), 0, 4096, 24, False)
    expected = memory[4096:4120].view(np.float32).copy()
    result = result_of([passed_on], memory, (), Response, inputs_end=4120)
    assert (result["Y"] == expected).all()
    result["Y"][:] = 0
    assert (memory[4096:4120].view(np.float32) == expected).all()
    assert np.shares_memory(result_of([passed_on], memory, (), Response, inputs_end=4096)["Y"], memory)


WORDS = [b"a", b"", b"\x00\xff\x00"]
ENCODED = b"\x01\x00\x00\x00a\x00\x00\x00\x00\x03\x00\x00\x00\x00\xff\x00"


def written_by_a_model(memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int], room: int = 0) -> Result:
    """Return the result of a model that has written this at the very end of the region, with room behind it."""
    offset = HOST_SIZE - len(encoded) - room
    memory[offset : offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
    return read([OutputPlace("WORDS", dtypes.BYTES, tuple(shape), 0, offset, len(encoded) + room, False)], memory)


def overflowed(encoded: bytes, shape: list[int], dtype: Any = np.uint8) -> Result:
    """Return the result of a model whose strings found no room, and came back in the response."""
    response = Response(WORDS=np.frombuffer(encoded, np.uint8).astype(dtype))
    return read(
        [OutputPlace("WORDS", dtypes.BYTES, tuple(shape), 0, 0, 0, True)], np.empty(HOST_SIZE, np.uint8), response
    )


@pytest.mark.parametrize(("encoded", "shape"), [(ENCODED, [3]), (ENCODED, [3, 1]), (ENCODED[:5], []), (b"", [0, 5])])
def test_strings_are_bytes_objects(memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int]) -> None:
    for room in (0, 1, 4, 100):
        result = written_by_a_model(memory, encoded, shape, room)
        memory[:] = 255  # which changes nothing that is read
        array = result["WORDS"]
        assert (array.dtype, array.shape) == (np.dtype(object), tuple(shape))
        assert array.ravel().tolist() == WORDS[: array.size]
        assert {type(word) for word in array.ravel()} <= {bytes}
        assert result.bytes_avoided == len(encoded) + room


# What no reading believes is in tests/unit/test_view.py; here: that it is the peer's fault, wherever it lies.


# What no reading believes is in tests/unit/test_view.py; here: that it is the peer's fault, wherever it lies.
@pytest.mark.parametrize(
    ("encoded", "shape"),
    [(ENCODED, [4]), (struct.pack("<i", -4) + b"four", [1]), (b"", []), (b"", [0, 2**62, 2**62])],
    ids=["one more than there are", "a negative length", "nothing, without dimensions", "a shape that no array has"],
)
def test_lying_strings_are_the_peers_fault(memory: npt.NDArray[np.uint8], encoded: bytes, shape: list[int]) -> None:
    for make in (functools.partial(written_by_a_model, memory), overflowed):
        with pytest.raises(PeerError, match="the model's results break the protocol: .*; install the same release"):
            make(encoded, shape)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, object], ids=str)
def test_a_response_that_does_not_carry_strings_as_bytes_is_the_peers_fault(dtype: Any) -> None:
    said = "whose elements are not bytes" if dtype is object else "the model's results break the protocol: "
    with pytest.raises(PeerError, match=said):
        overflowed(ENCODED, [3], dtype)


def test_a_part_of_a_split_call_with_other_rows_than_it_was_given_is_the_peers_fault() -> None:
    def one_row(_: Order, inputs: Arrays) -> Arrays:
        return {"OUT0": inputs["IN0"][:1]}

    said = r"gave output 'OUT0' as float32 of shape \[1, 3\], but the parts before need"
    with FakeServer(config("m", dims="3", max_batch_size=4), compute=one_row) as server, client_of(server) as client:
        for count in (5, 8):
            with pytest.raises(PeerError, match=said):
                client.infer("m", {"IN0": np.ones((count, 3), np.float32)}, split=True)
