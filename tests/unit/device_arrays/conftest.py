"""Two GPUs of the fake driver, whose streams are late; arrays on them, and kernels that write them late."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.gpu.arrays.device_array import DeviceArray, StridedArray
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts

__all__ = ["Array", "Gpu", "OnGpu", "numbers"]

Array = npt.NDArray[Any]
KERNEL_S = 0.1
OnGpu = DeviceArray | StridedArray


def numbers(shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32) -> Array:
    """Return 1, 2, 3 … as bytes of a type, so that types that cannot count have different elements, too."""
    kind = np.dtype(dtype)
    content = (np.arange(math.prod(shape) * kind.itemsize) % 250 + 1).astype(np.uint8)
    return (content % 2 if kind == np.bool_ else content).view(kind).reshape(shape)


class Gpu:
    """What tests do with GPUs. All is freed by :meth:`close`.

    Attributes
    ----------
    driver : FakeDriver
    runtime : CudaRuntime
    """

    def __init__(self, driver: FakeDriver, runtime: CudaRuntime) -> None:
        self.driver = driver
        self.runtime = runtime
        self._memory: list[tuple[int, int]] = []
        self._streams: list[tuple[int, int]] = []

    def stream(self, device: int = 0) -> int:
        stream = self.runtime.create_stream(device)
        self._streams.append((stream, device))
        return stream

    def array(self, values: Array, device: int = 0, **options: Any) -> DeviceArray:
        """Return an array with these values."""
        address = self.runtime.allocate(max(values.nbytes, 1), device)
        self._memory.append((address, device))
        self.driver.memory(address, values.shape, values.dtype)[...] = values
        return DeviceArray(self.runtime, address, values.shape, values.dtype, device, None, **options)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32, device: int = 0) -> DeviceArray:
        """Return an array full of rubbish."""
        return self.array(
            np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0xEE, np.uint8).view(dtype).reshape(shape), device
        )

    def strided(self, values: Array, device: int = 0) -> StridedArray:
        """Return a part of an array as it lies in an array of NumPy that owns its memory."""
        whole = values
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        there = self.array(whole.reshape(-1), device)
        begin = there.address + values.ctypes.data - whole.ctypes.data
        return StridedArray(self.runtime, begin, values.shape, values.strides, values.dtype, device, None)

    def read(self, array: OnGpu) -> Array:
        """Return what is there now, whatever is on streams."""
        if isinstance(array, DeviceArray):
            return np.array(self.driver.memory(array.address, array.shape, array.dtype))
        low = sum(min((size - 1) * stride, 0) for size, stride in zip(array.shape, array.strides, strict=True))
        high = sum(max((size - 1) * stride, 0) for size, stride in zip(array.shape, array.strides, strict=True))
        memory = self.driver.memory(array.address + low, (high - low + array.dtype.itemsize,), np.uint8)
        return np.array(np.ndarray(array.shape, array.dtype, memory, -low, array.strides))

    def write_late(self, array: DeviceArray, values: Array, stream: int) -> None:
        """Let a kernel write an array, on a stream, much later than anything else is done there."""

        def write() -> None:
            time.sleep(KERNEL_S)
            self.driver.memory(array.address, array.shape, array.dtype)[...] = values

        with self.runtime.on(array.device):
            self.driver.launch(stream, write)

    def wait(self) -> None:
        for device in range(self.runtime.device_count()):
            self.runtime.synchronize_device(device)

    def close(self) -> None:
        self.wait()
        for stream, device in self._streams:
            self.runtime.destroy_stream(stream, device)
        for address, device in self._memory:
            self.runtime.free(address, device)


DELAY_S = 0.002


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    driver = FakeDriver.load()
    before = driver.live()
    assert before == LiveCounts()
    gpu = Gpu(driver, driver.runtime())
    driver.delay(DELAY_S)
    yield gpu
    driver.delay(0)
    gpu.close()
    if driver.live() != LiveCounts():
        gc.collect()
    assert driver.violations() == []
    assert driver.live() == LiveCounts()
    driver.forget()
