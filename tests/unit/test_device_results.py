"""What a client makes of results that speak of GPUs: outputs there. Any process may have written them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.result import Result
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.cuda.bank import DeviceMemory
from shm_backend_utils.memory.cuda.events import EventListener
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import runtime_that_gives_all_back

HOST_SIZE, DEVICE_SIZE = 8192, 4096
DEVICE = 1
FP32 = dtypes.BY_NAME["FP32"]
ON_HOST = OutputPlace("Y", FP32, (2, 3), 0, 4096, 24, is_in_response=False)
ON_GPU = OutputPlace("X", FP32, (2, 3), 1, 1024, 24, is_in_response=False)
LABELS = OutputPlace("LABELS", dtypes.BY_NAME["INT64"], (2,), 0, 0, 0, is_in_response=True)


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
    *places: OutputPlace,
    allocation: CudaAllocation,
    memory: npt.NDArray[np.uint8] | None = None,
    response: Response | None = None,
) -> Result:
    """Return the result of a call that has memory on the host and on a GPU."""
    data = bytes(results.results_length(b"")) + results.encode(places)
    outputs = results.decode(data, [HOST_SIZE, DEVICE_SIZE]).outputs
    devices = [DeviceMemory(allocation, EventListener(allocation.runtime))]
    return result_of(outputs, host_memory() if memory is None else memory, devices, lambda: response or Response())


def test_an_output_is_where_the_model_wrote_it(allocation: CudaAllocation) -> None:
    result = read(ON_GPU, ON_HOST, allocation=allocation)
    x: Any = result["X"]
    assert (x.address - allocation.address, x.device, x.shape, x.dtype) == (1024, DEVICE, (2, 3), np.dtype(np.float32))
    assert x.get().tobytes() == bytes(range(24))
    assert result["Y"].tobytes() == bytes(range(24))
    assert result.bytes_avoided == 48


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in dtypes.BY_NAME.values() if dtype.itemsize], ids=lambda row: row.name
)
def test_an_output_on_a_gpu_may_be_of_any_type(allocation: CudaAllocation, dtype: dtypes.DType) -> None:
    array = read(ON_GPU._replace(dtype=dtype, shape=(2,), byte_size=2 * dtype.itemsize), allocation=allocation)["X"]
    assert (array.dtype, array.shape) == (dtype.numpy, (2,))


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [((), 4, 0), ((1,), 4, DEVICE_SIZE - 4), ((1024,), DEVICE_SIZE, 0), ((0, 5), 0, 0)],
)
def test_an_output_may_lie_anywhere_in_its_own_memory(
    allocation: CudaAllocation, shape: tuple[int, ...], byte_size: int, offset: int
) -> None:
    place = ON_GPU._replace(shape=shape, byte_size=byte_size, offset=offset)
    array: Any = read(place, allocation=allocation)["X"]
    assert (array.address - allocation.address, array.nbytes) == (offset, byte_size)


@pytest.mark.parametrize(
    ("region", "offset"),
    [(1, DEVICE_SIZE - 20), (1, HOST_SIZE - 24), (0, HOST_SIZE - 20), (2, 0), (65535, 0), (1, 2**64 - 24)],
)
def test_an_output_outside_its_own_memory_is_the_peers_fault(
    allocation: CudaAllocation, region: int, offset: int
) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        read(ON_GPU._replace(region=region, offset=offset), allocation=allocation)


def test_an_output_for_which_the_gpu_had_no_room_is_taken_from_the_response(allocation: CudaAllocation) -> None:
    labels = np.array([1, 2], np.int64)
    result = read(ON_GPU, LABELS, allocation=allocation, response=Response(LABELS=labels))
    assert result["LABELS"] is labels
    assert (result.overflowed, result.bytes_avoided) == ({"LABELS": 16}, 24)


def test_an_array_on_a_gpu_holds_the_call_memory_until_it_dies(allocation: CudaAllocation) -> None:
    memory = host_memory()
    is_held = weakref.ref(memory)
    result = read(ON_GPU, allocation=allocation, memory=memory)
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
    result = read(LABELS, allocation=allocation, memory=memory, response=Response(LABELS=np.zeros(2)))
    del memory
    assert is_held() is None
    assert len(result) == 1
