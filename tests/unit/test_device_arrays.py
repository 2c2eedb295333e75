"""DeviceArrays: how the calls of a session take over, make, copy and wait for arrays on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.model.devices.arrays import DeviceArrays, device_of, is_on_device
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.tensors.device_view import DeviceView
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, kernel
from tests.unit.fake_gpu import INTEGERS, fails_by, numbers, objects_of, runtime_that_gives_all_back, that_nobody_loads

DEVICE = 1
"""The instance's GPU; the thread's current one is another."""
INT32 = dtypes.BY_NAME["INT32"]

on_each_gpu = pytest.mark.parametrize("device", [0, DEVICE])


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
        for device in (0, DEVICE):
            with device_guard(cuda, device):
                cuda.current_stream().drain()  # what is on a stream keeps its arrays
    assert objects_of(os.getpid()) == []


@pytest.fixture
def arrays(cuda: FakeCuda) -> DeviceArrays:
    return DeviceArrays(CudaAccess(lambda: cuda), DEVICE)


def numbers_on(cuda: FakeCuda, device: int, *shape: int) -> FakeDeviceArray:
    with device_guard(cuda, device):
        return numbers(cuda, *shape)


def still_to_be_filled(cuda: FakeCuda, device: int, value: int) -> FakeDeviceArray:
    """Return an array of three numbers that a kernel writes, which was launched on the device's current stream."""
    with device_guard(cuda, device):
        array = numbers(cuda, 3)
        array.fill(value)
    return array


def view_of(array: FakeDeviceArray) -> DeviceView:
    return DeviceView("X", array, INT32, "direct", array.runtime, array.device, writable=True)


def host_view(array: npt.NDArray[Any]) -> TensorView:
    return TensorView("X", array, INT32, "direct")


def current_stream(cuda: FakeCuda, device: int) -> int:
    with device_guard(cuda, device):
        return cuda.current_stream().ptr


def noted(cuda: FakeCuda, *operations: str) -> list[tuple[str, Any]]:
    return [(name, detail) for name, detail in cuda.log if name in operations]


def test_waiting_for_no_device_loads_nothing(cuda: FakeCuda) -> None:
    with that_nobody_loads(cuda) as access:
        DeviceArrays(access, DEVICE).synchronize([])


# Streams


def test_the_stream_is_the_current_one_of_the_instances_gpu(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    assert arrays.stream().device == DEVICE
    assert arrays.stream().ptr == current_stream(cuda, DEVICE)
    with device_guard(cuda, DEVICE):
        own = cuda.stream()
    with own:
        assert arrays.stream() is own


def test_every_device_is_waited_for_once(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    filled = [still_to_be_filled(cuda, device, 7) for device in (0, 1)]
    arrays.synchronize([0, 1])
    assert [array.peek().tolist() for array in filled] == [[7] * 3] * 2
    assert noted(cuda, "synchronize") == [("synchronize", current_stream(cuda, device)) for device in (0, 1)]


def test_what_failed_on_a_device_is_told_by_who_waits_for_it(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    cuda.fail_next("synchronize", "cudaErrorIllegalAddress")
    with fails_by("cudaErrorIllegalAddress"):
        arrays.synchronize([DEVICE])
    assert cuda.current_device() == 0


# Taking over


class Foreign:
    """An array of another library, on some device."""

    def __init__(self, array: Any, kind: int = 2) -> None:
        self._array = array
        self._kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, self._array.device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)


@on_each_gpu
def test_what_speaks_dlpack_is_taken_over_without_a_copy(cuda: FakeCuda, arrays: DeviceArrays, device: int) -> None:
    array = numbers_on(cuda, device, 3)
    for given in (array, Foreign(array), array.__dlpack__(stream=-1)):
        adopted = arrays.adopt(given)
        assert (adopted.address, adopted.device) == (array.address, device)


def test_arrays_on_gpus_are_told_from_all_else(cuda: FakeCuda) -> None:
    array = numbers_on(cuda, DEVICE, 3)
    assert [is_on_device(value) for value in (array, Foreign(array))] == [True, True]
    others = [np.zeros(3), host_view(np.zeros(3, np.int32)), Foreign(array, kind=3), [1, 2], 1, None, "cuda:0"]
    assert [is_on_device(value) for value in others] == [False] * len(others)
    assert device_of(Foreign(array)) == DEVICE


@on_each_gpu
def test_a_contiguous_array_is_viewed_where_it_lies(cuda: FakeCuda, arrays: DeviceArrays, device: int) -> None:
    array = numbers_on(cuda, device, 2, 3)
    view = arrays.view("X", array[1], INT32, "triton", writable=False)
    assert cuda.address_of(view.array) == array.address + 12
    assert (view.name, view.path, view.writable) == ("X", "triton", False)
    assert view.attributes == BufferAttributes(MemoryType.GPU, device, 12, None)


@on_each_gpu
def test_an_array_in_another_order_is_viewed_as_a_copy_on_its_own_gpu(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    array = numbers_on(cuda, device, 2, 3)
    view = arrays.view("X", array.transpose(), INT32, "triton", writable=True)
    assert (view.shape, view.device, view.array.is_contiguous) == ((3, 2), device, True)
    assert view.array.get().tolist() == [[0, 3], [1, 4], [2, 5]]
    view.array.peek()[0, 1] = 50
    assert array.peek()[1, 0] == 3


# Making


def test_new_memory_is_on_the_instances_gpu(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    view = arrays.empty("X", (2, 3), INT32, "triton")
    assert (view.shape, view.dtype, view.path, view.writable) == ((2, 3), INTEGERS, "triton", True)
    assert view.attributes == BufferAttributes(MemoryType.GPU, DEVICE, 24, None)


# Copying


@on_each_gpu
def test_an_array_of_the_host_is_copied_to_the_gpu_of_the_target(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    target = view_of(numbers_on(cuda, device, 3))
    assert arrays.copy(target, np.array([7, 8, 9], np.int32)) == device
    assert target.array.get().tolist() == [7, 8, 9]


@on_each_gpu
def test_an_array_of_a_gpu_is_copied_to_the_host_after_what_is_on_the_stream(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    target = np.zeros(3, np.int32)
    assert arrays.copy(host_view(target), still_to_be_filled(cuda, device, 7)) == device
    arrays.synchronize([device])
    assert target.tolist() == [7, 7, 7]


@on_each_gpu
def test_a_copy_within_a_gpu_is_done_when_that_is_synchronized(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    target = view_of(numbers_on(cuda, device, 3))
    busy = arrays.copy(target, still_to_be_filled(cuda, device, 7))
    assert (busy, target.array.peek().tolist()) == (device, [0, 1, 2])
    arrays.synchronize([busy])
    assert target.array.peek().tolist() == [7, 7, 7]


@on_each_gpu
def test_a_copy_between_gpus_comes_after_what_is_on_the_stream_of_the_source(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    target = view_of(numbers_on(cuda, device, 3))
    busy = arrays.copy(target, still_to_be_filled(cuda, 1 - device, 7))
    arrays.synchronize([busy])
    assert target.array.peek().tolist() == [7, 7, 7]


@on_each_gpu
def test_a_copy_on_the_host_is_complete_and_after_what_is_on_the_stream(
    cuda: FakeCuda, arrays: DeviceArrays, device: int
) -> None:
    view = view_of(still_to_be_filled(cuda, device, 7))
    copied = arrays.to_host(view)
    assert isinstance(copied, np.ndarray)
    assert copied.tolist() == [7, 7, 7]
    copied[:] = 0
    assert view.array.get().tolist() == [7, 7, 7]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_a_copy_may_have_no_dimensions_and_no_elements(
    cuda: FakeCuda, arrays: DeviceArrays, shape: tuple[int, ...]
) -> None:
    view = view_of(numbers_on(cuda, DEVICE, *shape))
    host = arrays.to_host(view)
    assert (host.shape, arrays.to_device(host_view(host), None).shape) == (shape, shape)


# To the GPU


def test_pageable_memory_may_be_used_again_when_it_was_copied(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    host = np.array([7, 8, 9], np.int32)
    copied = arrays.to_device(host_view(host), None)
    host[:] = 0
    assert copied.device == DEVICE
    with device_guard(cuda, DEVICE):
        assert copied.get().tolist() == [7, 8, 9]


def test_pinned_memory_is_copied_while_the_host_goes_on(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    host = np.array([7, 8, 9], np.int32)
    cuda.pin(host.ctypes.data, host.nbytes)
    copied = arrays.to_device(host_view(host), None)
    host[0] = 70  # the copy has not been made yet
    assert noted(cuda, "synchronize") == []
    arrays.synchronize([DEVICE])
    assert copied.peek().tolist() == [70, 8, 9]
    cuda.unpin(host.ctypes.data)


def test_a_read_only_input_is_copied_too(arrays: DeviceArrays) -> None:
    host = np.array([7, 8, 9], np.int32)
    host.flags.writeable = False
    assert arrays.to_device(host_view(host), None).get().tolist() == [7, 8, 9]


def test_a_copy_is_made_on_the_stream_that_is_asked_for(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    with device_guard(cuda, DEVICE):
        stream = cuda.stream()
    arrays.to_device(host_view(np.zeros(3, np.int32)), stream)
    arrays.to_device(host_view(np.zeros(3, np.int32)), None)
    assert noted(cuda, "copy") == [
        ("copy", ("host to device", 12, stream.ptr)),
        ("copy", ("host to device", 12, current_stream(cuda, DEVICE))),
    ]


def test_what_comes_later_on_the_stream_that_is_asked_for_finds_the_copy(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    host = np.array([7, 8, 9], np.int32)
    cuda.pin(host.ctypes.data, host.nbytes)
    seen: list[list[int]] = []
    with device_guard(cuda, DEVICE):
        stream = cuda.stream()
        copied = arrays.to_device(host_view(host), stream)
        with stream:
            kernel(lambda memory: seen.append(memory.tolist()), copied)
        cuda.synchronize(stream.ptr)
    assert seen == [[7, 8, 9]]
    cuda.unpin(host.ctypes.data)


def test_a_copy_on_another_stream_comes_after_what_had_its_memory_before(cuda: FakeCuda, arrays: DeviceArrays) -> None:
    with device_guard(cuda, DEVICE):
        stream = cuda.stream()
    arrays.to_device(host_view(np.zeros(3, np.int32)), stream)
    kept = [name for name, _ in noted(cuda, "order", "copy")]
    assert kept == ["order", "copy"]
    assert noted(cuda, "order") == [("order", (current_stream(cuda, DEVICE), stream.ptr))]


@pytest.mark.parametrize("method", ["set_device", "empty", "copy", "order"])
def test_a_copy_that_fails_leaves_the_current_device_and_nothing_else(
    cuda: FakeCuda, arrays: DeviceArrays, method: str
) -> None:
    cuda.fail_next(method, "cudaErrorMemoryAllocation")
    with fails_by("cudaErrorMemoryAllocation"):
        arrays.to_device(host_view(np.zeros(3, np.int32)), None)
    assert cuda.current_device() == 0
