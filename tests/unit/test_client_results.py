"""What a client makes of the results that a model has written beside its outputs: arrays over the slot's memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.paths.further import GpuMemory
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import ClosedError, PeerError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.results import OutputPlace
from tests.unit.fake_gpu import DRIVER, runtime_that_gives_all_back

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
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def gpu(cuda: CudaRuntime) -> Iterator[GpuMemory]:
    """What the call has on a GPU; its bytes count from 0 to 255, again and again."""
    allocation = CudaAllocation(cuda, DEVICE_SIZE, DEVICE)
    DRIVER.memory(allocation.address, (DEVICE_SIZE,), np.uint8)[:] = np.arange(DEVICE_SIZE).astype(np.uint8)
    memory = GpuMemory(cuda, allocation.address, DEVICE_SIZE, DEVICE, allocation.keeper, None)
    yield memory
    memory._keeper = None
    allocation.free()


def read(
    places: Sequence[OutputPlace],
    memory: npt.NDArray[np.uint8],
    response: Response | None = None,
    devices: Sequence[GpuMemory] = (),
    bytes_avoided: int = 0,
) -> Result:
    """Return the result of a call after which the slot's record says this of its outputs."""
    record = (bytes(16) + results.encode(places)).ljust(4096, b"\0")
    sizes = [memory.nbytes, *[each.byte_size for each in devices]]
    found = results.decode(record, sizes)
    return result_of(found.outputs, memory, devices, lambda: response or Response(), bytes_avoided)


# On the host


@pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
def test_an_output_is_a_view_of_the_memory_that_the_model_wrote(
    memory: npt.NDArray[np.uint8], dtype: dtypes.DType
) -> None:
    memory[:] = 0
    array = read([OutputPlace("Y", dtype, (2, 3), 0, 4096, 6 * dtype.itemsize, False)], memory)["Y"]
    assert (array.dtype, array.shape) == (dtype.numpy, (2, 3))
    memory[4096 + 5 * dtype.itemsize :] = 1
    assert np.flatnonzero(array).tolist() == [5]


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [((), 4, 0), ((1,), 4, HOST_SIZE - 4), ((0,), 0, HOST_SIZE), ((0, 5), 0, 0), ((HOST_SIZE // 4,), HOST_SIZE, 0)],
    ids=["one number", "the last bytes", "nothing at the end", "nothing", "the whole region"],
)
def test_an_output_may_lie_anywhere_in_the_region(
    memory: npt.NDArray[np.uint8], shape: tuple[int, ...], byte_size: int, offset: int
) -> None:
    array = read([OutputPlace("Y", FP32, shape, 0, offset, byte_size, False)], memory)["Y"]
    assert array.shape == shape
    assert array.tobytes() == memory[offset : offset + byte_size].tobytes()


def test_an_output_that_found_no_room_is_taken_from_the_response(memory: npt.NDArray[np.uint8]) -> None:
    labels = np.array([1, 2], np.int64)
    result = read([ON_HOST, LABELS], memory, Response(LABELS=labels))
    assert result["LABELS"] is labels
    assert result.overflowed == {"LABELS": 16}


def test_bytes_that_the_response_carried_were_not_avoided(memory: npt.NDArray[np.uint8]) -> None:
    result = read([ON_HOST, LABELS], memory, Response(LABELS=np.zeros(2)), bytes_avoided=100)
    assert result.bytes_avoided == 100 + 24


def test_an_output_that_is_neither_in_memory_nor_in_the_response_is_the_peers_fault(
    memory: npt.NDArray[np.uint8],
) -> None:
    with pytest.raises(PeerError, match="break the protocol: LABELS; is it of the same version?"):
        read([LABELS], memory)


def test_without_outputs_the_result_is_empty(memory: npt.NDArray[np.uint8]) -> None:
    assert dict(read([], memory)) == {}


@pytest.mark.parametrize("shape", [(0, 2**62), (2**63, 0), (2**62, 2**62, 0)], ids=str)
def test_an_empty_output_of_a_shape_that_no_array_has_is_the_peers_fault(
    memory: npt.NDArray[np.uint8], shape: tuple[int, ...]
) -> None:
    with pytest.raises(PeerError):
        read([OutputPlace("Y", FP32, shape, 0, 0, 0, False)], memory)


def test_one_broken_output_spoils_the_whole_result(memory: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(PeerError):
        read([ON_HOST, ON_HOST._replace(name="Z", offset=HOST_SIZE - 23)], memory)


# The result itself


def test_a_copy_holds_no_memory_of_the_region(memory: npt.NDArray[np.uint8]) -> None:
    result = read([ON_HOST], memory)
    copied = result.copy()["Y"]
    expected = copied.tobytes()
    memory[:] = 0
    assert copied.tobytes() == expected != result["Y"].tobytes()


def test_an_array_that_was_taken_out_outlives_the_release(memory: npt.NDArray[np.uint8]) -> None:
    result = read([ON_HOST], memory)
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
    with read([ON_HOST], memory) as result:
        use(result)
    with pytest.raises(ClosedError, match="this result is closed"):
        use(result)


def test_a_result_shows_its_path_and_shapes_and_that_it_was_released(memory: npt.NDArray[np.uint8]) -> None:
    result = read([ON_HOST], memory)
    assert repr(result) == "<Result path=direct 'Y' float32 [2, 3]>"
    result.release()
    assert repr(result) == "<Result path=direct released>"


# On GPUs


def test_an_output_is_where_the_model_wrote_it(memory: npt.NDArray[np.uint8], gpu: GpuMemory) -> None:
    result = read([ON_GPU, ON_HOST], memory, devices=[gpu])
    x: Any = result["X"]
    offset = x.address - gpu.address
    assert (offset, x.device, x.shape, x.dtype) == (1024, DEVICE, (2, 3), np.dtype(np.float32))
    assert x.to_host().tobytes() == bytes(range(24))
    assert result["Y"].tobytes() == bytes(range(24))
    assert result.bytes_avoided == 48


def test_strings_on_a_gpu_are_the_peers_fault(memory: npt.NDArray[np.uint8], gpu: GpuMemory) -> None:
    with pytest.raises(PeerError, match="X, which are strings, on a GPU"):
        read([OutputPlace("X", dtypes.BYTES, (1,), 1, 1024, 24, False)], memory, devices=[gpu])


@pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])
def test_an_output_on_a_gpu_may_be_of_any_type(
    memory: npt.NDArray[np.uint8], gpu: GpuMemory, dtype: dtypes.DType
) -> None:
    place = OutputPlace("X", dtype, (2,), 1, 0, 2 * dtype.itemsize, False)
    array = read([place], memory, devices=[gpu])["X"]
    assert (array.dtype, array.shape) == (dtype.numpy, (2,))


@pytest.mark.parametrize(
    ("shape", "byte_size", "offset"),
    [((), 4, 0), ((1,), 4, DEVICE_SIZE - 4), ((1024,), DEVICE_SIZE, 0), ((0, 5), 0, 0)],
)
def test_an_output_may_lie_anywhere_in_its_own_memory(
    memory: npt.NDArray[np.uint8], gpu: GpuMemory, shape: tuple[int, ...], byte_size: int, offset: int
) -> None:
    place = OutputPlace("X", FP32, shape, 1, offset, byte_size, False)
    array: Any = read([place], memory, devices=[gpu])["X"]
    assert (array.address - gpu.address, array.nbytes) == (offset, byte_size)


@pytest.mark.parametrize(
    ("region", "offset"), [(1, DEVICE_SIZE - 23), (1, HOST_SIZE - 24), (0, HOST_SIZE - 23), (2, 0), (65535, 0)]
)
def test_an_output_outside_its_own_memory_is_the_peers_fault(
    memory: npt.NDArray[np.uint8], gpu: GpuMemory, region: int, offset: int
) -> None:
    with pytest.raises(PeerError, match="the model's results break the protocol: "):
        read([ON_GPU._replace(region=region, offset=offset)], memory, devices=[gpu])


def test_an_output_for_which_the_gpu_had_no_room_is_taken_from_the_response(
    memory: npt.NDArray[np.uint8], gpu: GpuMemory
) -> None:
    labels = np.array([1, 2], np.int64)
    result = read([ON_GPU, LABELS], memory, Response(LABELS=labels), [gpu])
    assert result["LABELS"] is labels
    assert (result.overflowed, result.bytes_avoided) == ({"LABELS": 16}, 24)


def test_an_array_on_a_gpu_holds_the_call_memory_until_it_dies(gpu: GpuMemory) -> None:
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


def test_memory_that_no_output_is_in_is_not_held(gpu: GpuMemory) -> None:
    memory = np.zeros(HOST_SIZE, np.uint8)
    is_held = weakref.ref(memory)
    result = read([LABELS], memory, Response(LABELS=np.zeros(1)), [gpu])
    del memory
    assert is_held() is None
    assert len(result) == 1
