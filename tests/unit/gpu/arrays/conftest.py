"""Two GPUs of the fake driver, whose streams are late; arrays on them, and kernels that write them late."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.gpu.arrays.device_array import DeviceArray, StridedArray
from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.fakes import DRIVER, array_on, content, kernel, runtime_that_gives_all_back, stream_on

Array = npt.NDArray[Any]
KERNEL_S = 0.1
OnGpu = DeviceArray | StridedArray


def numbers(shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32) -> Array:
    """Return 1, 2, 3 … as bytes of a type, so that types that cannot count have different elements, too."""
    kind = np.dtype(dtype)
    content = (np.arange(math.prod(shape) * kind.itemsize) % 250 + 1).astype(np.uint8)
    return (content % 2 if kind == np.bool_ else content).view(kind).reshape(shape)


class Gpu:
    def __init__(self, runtime: CudaRuntime, streams: contextlib.ExitStack) -> None:
        self.runtime = runtime
        self._streams = streams

    def stream(self, device: int = 0) -> int:
        return self._streams.enter_context(stream_on(self.runtime, device))

    def array(self, values: Array, device: int = 0) -> DeviceArray:
        return array_on(self.runtime, values, device, values.dtype)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32, device: int = 0) -> DeviceArray:
        byte_size = math.prod(shape) * np.dtype(dtype).itemsize
        return self.array(np.full(byte_size, 0xEE, np.uint8).view(dtype).reshape(shape), device)

    def strided(self, values: Array, device: int = 0) -> StridedArray:
        """Return a part of an array as it lies in an array of NumPy that owns its memory."""
        whole = values
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        there = self.array(whole.reshape(-1), device)
        begin = there.address + values.ctypes.data - whole.ctypes.data
        return StridedArray(self.runtime, begin, values.shape, values.strides, values.dtype, device, there)

    def written_late(self, values: Array, *, says_so: bool) -> DeviceArray:
        """Return an array that a kernel writes, on a stream of ours, much later than anything else is done."""
        array, stream = self.empty(values.shape, values.dtype), self.stream()
        with self.runtime.on(0):
            kernel(stream, lambda memory: np.copyto(memory, values), array, late_s=KERNEL_S)
        on = stream if says_so else None
        return DeviceArray(self.runtime, array.address, array.shape, array.dtype, 0, array, written_on=on)

    def read(self, array: OnGpu) -> Array:
        """Return what is there now, whatever is on streams."""
        if isinstance(array, DeviceArray):
            return np.array(content(array))
        low = sum(min((size - 1) * stride, 0) for size, stride in zip(array.shape, array.strides, strict=True))
        high = sum(max((size - 1) * stride, 0) for size, stride in zip(array.shape, array.strides, strict=True))
        memory = DRIVER.memory(array.address + low, (high - low + array.dtype.itemsize,), np.uint8)
        return np.array(np.ndarray(array.shape, array.dtype, memory, -low, array.strides))

    def wait(self) -> None:
        for device in range(self.runtime.device_count()):
            self.runtime.synchronize_device(device)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with runtime_that_gives_all_back() as runtime, contextlib.ExitStack() as streams:
        DRIVER.delay(0.002)
        yield Gpu(runtime, streams)
        DRIVER.delay(0)
