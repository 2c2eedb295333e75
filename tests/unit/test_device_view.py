"""DeviceView: a tensor on a GPU where it lies, for any array library, by the array API's rules for CUDA."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import DeviceMemoryError, ModelError
from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMappings
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, device_guard
from shm_backend_utils.model.mapping.memory import DeviceMemory
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.tensors.device_view import DeviceView
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray
from tests.unit.fake_gpu import INTEGERS, fails_by, numbers, objects_of, runtime_that_gives_all_back

DEVICE = 1
HANDLE = bytes(range(HANDLE_LENGTH))
LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
    assert objects_of(os.getpid()) == []


def view_of(array: FakeDeviceArray, *, writable: bool = True, handle: bytes | None = HANDLE) -> DeviceView:
    dtype = dtypes.from_numpy(array.dtype, "IMAGE")
    return DeviceView("IMAGE", array, dtype, "direct", array.runtime, array.device, writable=writable, handle=handle)


def view_of_numbers(cuda: FakeCuda, *shape: int, **options: Any) -> DeviceView:
    """Return a view of 0, 1, 2 … on a device that is not the current one."""
    with device_guard(cuda, DEVICE):
        return view_of(numbers(cuda, *shape), **options)


def orders(cuda: FakeCuda) -> list[tuple[int, int]]:
    """Return which streams had others wait for them."""
    return [detail for name, detail in cuda.log if name == "order"]


def current_stream(cuda: FakeCuda) -> int:
    with device_guard(cuda, DEVICE):
        return cuda.current_stream().ptr


# What a view is


@pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=list(dtypes.BY_NAME))
def test_a_view_knows_its_tensor(cuda: FakeCuda, dtype: DType) -> None:
    view = view_of(cuda.empty((2, 3), dtype.numpy))
    assert (view.name, view.path, view.shape, view.device) == ("IMAGE", "direct", (2, 3), 0)
    assert (view.dtype, view.triton_dtype) == (dtype.numpy, dtype.name)


def test_a_view_reads_as_its_tensor(cuda: FakeCuda) -> None:
    assert repr(view_of_numbers(cuda, 2, 3)) == "<DeviceView 'IMAGE' INT32 [2, 3] GPU 1 path=direct>"


@pytest.mark.parametrize("handle", [HANDLE, None], ids=["the client's", "its own"])
@pytest.mark.parametrize(("shape", "nbytes"), [((2, 3), 24), ((), 4), ((0, 3), 0)], ids=str)
def test_a_view_knows_where_its_bytes_lie_and_by_which_handle(
    cuda: FakeCuda, shape: tuple[int, ...], nbytes: int, handle: bytes | None
) -> None:
    attributes = view_of_numbers(cuda, *shape, handle=handle).attributes
    assert attributes == BufferAttributes(MemoryType.GPU, DEVICE, nbytes, handle)


def test_a_view_of_a_clients_memory_has_the_handle_that_it_was_opened_by(cuda: FakeCuda) -> None:
    peer = FakeCuda()
    allocation = CudaAllocation(cuda, 1000, DEVICE)
    mapping = CudaMappings(peer).map(allocation.handle, 1000, DEVICE, "region")
    memory = DeviceMemory(mapping, 0, 1000).part(100, 900)
    view = memory.view("X", 28, 24, dtypes.BY_NAME["INT32"], (2, 3), writable=False)
    assert view is not None
    assert view.attributes == BufferAttributes(MemoryType.GPU, DEVICE, 24, allocation.handle)
    assert len(allocation.handle) == HANDLE_LENGTH
    assert peer.address_of(view.array) - mapping.address == 128


@pytest.mark.parametrize("writable", [True, False])
def test_a_view_says_whether_it_may_be_written_to(cuda: FakeCuda, writable: bool) -> None:
    assert view_of_numbers(cuda, 2, writable=writable).writable is writable


# As an array


def test_cupy_returns_the_very_memory(cuda: FakeCuda) -> None:
    array = numbers(cuda, 2, 3)
    taken = view_of(array).cupy()
    assert (cuda.address_of(taken), taken.shape, taken.dtype) == (array.address, (2, 3), INTEGERS)
    taken[1, 2] = 50
    assert array.get()[1, 2] == 50


def test_an_array_made_from_a_view_outlives_it(cuda: FakeCuda) -> None:
    view = view_of_numbers(cuda, 3)
    taken = view.cupy()[1:]
    del view
    gc.collect()
    assert taken.get().tolist() == [1, 2]


def test_numpy_is_refused_with_the_two_ways_out(cuda: FakeCuda) -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        view_of_numbers(cuda, 2).numpy()
    assert isinstance(caught.value, ModelError)
    assert isinstance(caught.value, TypeError)
    for words in ("tensor 'IMAGE'", "memory of GPU 1", "NumPy cannot read", ".cupy()", "call.to_host(view)"):
        assert words in str(caught.value)
    assert HANDLE.hex() not in str(caught.value)


def test_cupy_is_refused_of_host_memory_with_the_ways_out() -> None:
    view = TensorView("IMAGE", np.zeros(2, np.float32), dtypes.BY_NAME["FP32"], "triton")
    with pytest.raises(DeviceMemoryError) as caught:
        view.cupy()
    for words in (
        "tensor 'IMAGE'",
        "host memory",
        ".numpy()",
        "call.to_device(view)",
        "FORCE_CPU_ONLY_INPUT_TENSORS: no",
    ):
        assert words in str(caught.value)


# DLPack


def test_the_dlpack_device_is_the_gpu(cuda: FakeCuda) -> None:
    assert view_of_numbers(cuda, 2).__dlpack_device__() == (2, DEVICE)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
def test_another_library_takes_a_view_without_a_copy(cuda: FakeCuda, shape: tuple[int, ...]) -> None:
    view = view_of_numbers(cuda, *shape)
    taken = cuda.adopt(view)
    assert (cuda.address_of(taken), taken.shape, taken.device) == (cuda.address_of(view.array), shape, DEVICE)


def test_what_another_library_takes_outlives_the_view(cuda: FakeCuda) -> None:
    view = view_of_numbers(cuda, 3)
    capsule = view.__dlpack__()
    del view
    gc.collect()
    assert cuda.adopt(capsule).get().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("stream", "consumer"), [(None, LEGACY), (1, LEGACY), (2, PER_THREAD)], ids=["None", "legacy", "per-thread"]
)
def test_a_default_stream_waits_for_the_current_one_of_the_tensors_gpu(
    cuda: FakeCuda, stream: int | None, consumer: int
) -> None:
    view_of_numbers(cuda, 2).__dlpack__(stream=stream)
    assert orders(cuda) == [(current_stream(cuda), consumer)]


def test_a_consumers_own_stream_waits_for_what_is_on_the_current_one_and_the_host_does_not(cuda: FakeCuda) -> None:
    view = view_of_numbers(cuda, 2)
    with device_guard(cuda, DEVICE):
        consumer, producer = cuda.stream(), cuda.stream()
        with producer:
            view.cupy().fill(5)
            capsule = view.__dlpack__(stream=consumer.ptr)
        assert orders(cuda) == [(producer.ptr, consumer.ptr)]
        assert view.array.peek().tolist() == [0, 1]  # nobody has waited
        cuda.synchronize(consumer.ptr)
    assert cuda.adopt(capsule).peek().tolist() == [5, 5]


def test_nobody_waits_if_the_consumer_asks_for_that(cuda: FakeCuda) -> None:
    view = view_of_numbers(cuda, 2)
    del cuda.log[:]
    capsule = view.__dlpack__(stream=-1)
    assert cuda.log == []
    assert cuda.address_of(cuda.adopt(capsule)) == cuda.address_of(view.array)


@pytest.mark.parametrize(
    "stream", [0, -2, -(2**63), True, False, 1.0, "1", b"", (), object()], ids=lambda s: repr(s)[:8]
)
def test_what_is_no_stream_of_cuda_is_refused_with_those_that_are(cuda: FakeCuda, stream: object) -> None:
    view = view_of_numbers(cuda, 2)
    del cuda.log[:]
    with pytest.raises(BufferError, match="expected 1 .legacy default., 2 .per-thread default., .* -1 for no"):
        view.__dlpack__(stream=stream)
    assert cuda.log == []


def test_a_stream_that_there_is_not_is_cudas_error(cuda: FakeCuda) -> None:
    with fails_by("cudaErrorInvalidResourceHandle"):
        view_of_numbers(cuda, 2).__dlpack__(stream=3)


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)], ids=str)
def test_the_version_that_the_consumer_knows_reaches_who_makes_the_capsule(
    cuda: FakeCuda, version: tuple[int, int] | None
) -> None:
    assert view_of_numbers(cuda, 2).__dlpack__(max_version=version).max_version == version


@pytest.mark.parametrize("device", [(1, 0), (2, 0), (2, 2), (13, DEVICE), (3, 0)], ids=str)
def test_a_view_does_not_move_to_another_device(cuda: FakeCuda, device: tuple[int, int]) -> None:
    with pytest.raises(BufferError, match=r"is on device \(2, 1\), asked for was "):
        view_of_numbers(cuda, 2).__dlpack__(dl_device=device)


def test_a_view_does_not_copy(cuda: FakeCuda) -> None:
    with pytest.raises(
        BufferError, match="a view of tensor 'IMAGE' never copies; copy the array that you make from it"
    ):
        view_of_numbers(cuda, 2).__dlpack__(copy=True)


@pytest.mark.parametrize("arguments", [{"dl_device": (2, DEVICE)}, {"copy": False}, {"dl_device": None, "copy": None}])
def test_what_is_so_anyway_may_be_asked_for(cuda: FakeCuda, arguments: dict[str, Any]) -> None:
    view = view_of_numbers(cuda, 2)
    assert cuda.address_of(cuda.adopt(view.__dlpack__(**arguments))) == cuda.address_of(view.array)


def test_an_array_of_numpy_is_refused_as_numpy_is(cuda: FakeCuda) -> None:
    with pytest.raises(DeviceMemoryError, match="which NumPy cannot read; use .cupy()"):
        np.asarray(view_of_numbers(cuda, 2))
