"""Arrays on the fake driver, and kernels that are NumPy's functions, late as its streams are."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import LEGACY_STREAM, CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

__all__ = ["FakeArray", "FakeLibrary", "FakeStream"]


class FakeStream:
    """A stream as CuPy and PyTorch have them: the current one of its thread for a ``with`` block."""

    def __init__(self, library: FakeLibrary, device: int) -> None:
        self._library = library
        self.device_id = device
        self.ptr = self.cuda_stream = library.runtime.create_stream(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol, and the CUstream."""
        return 0, self.ptr

    def __enter__(self) -> FakeStream:
        self._library.streams.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.streams.pop()


class FakeLibrary:
    """What an array library has: streams, memory and kernels.

    Attributes
    ----------
    runtime : CudaRuntime
    """

    def __init__(self, driver: FakeDriver) -> None:
        self.runtime = CudaRuntime()
        self._driver = driver
        self._thread = threading.local()

    @property
    def streams(self) -> list[int]:
        """The streams that are current in this thread, the innermost last."""
        found: list[int] = vars(self._thread).setdefault("streams", [LEGACY_STREAM])
        return found

    def empty(self, kind: type[FakeArray], count: int, dtype: npt.DTypeLike, device: int) -> FakeArray:
        """Return an array in memory of its own."""
        block = CudaAllocation(self.runtime, count * np.dtype(dtype).itemsize, device)
        return self.over(kind, block.address, (count,), np.dtype(dtype), device, block.keeper)

    def over(
        self,
        kind: type[FakeArray],
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        owner: object,
    ) -> FakeArray:
        """Return an array over memory."""
        byte_size = int(np.prod(shape)) * dtype.itemsize
        content = memoryview((ctypes.c_ubyte * byte_size).from_address(address))  # nothing here ever reads it
        return kind(self, np.frombuffer(content, np.uint8).view(dtype).reshape(shape), device, owner)

    def taken(self, kind: type[FakeArray], value: Any) -> FakeArray:
        """Return another library's array as one of this, by DLPack; the current stream waits for it."""
        found = imported(self.runtime, _ByDlpack(value), self.streams[-1])
        return self.over(kind, found.address, tuple(found.shape), found.dtype, found.device, found)

    def launch(self, kernel: Callable[..., None], *arrays: FakeArray) -> None:
        """Put a function of NumPy arrays on the current stream."""
        device = arrays[-1].device
        with self.runtime.on(device):
            self._driver.launch(self.streams[-1], lambda: kernel(*[each.content(self._driver) for each in arrays]))


class FakeArray:
    """An array on the fake driver, strided as NumPy's are.

    Parameters
    ----------
    library : FakeLibrary
    shadow : numpy.ndarray
        Has address, shape, strides and dtype, and is never read.
    device : int
    owner : object
        Keeps the memory.
    """

    def __init__(self, library: FakeLibrary, shadow: npt.NDArray[Any], device: int, owner: object) -> None:
        self._library = library
        self._shadow = shadow
        self._owner = owner
        self.device = device
        self.shape = shadow.shape
        self.dtype = shadow.dtype

    def content(self, driver: FakeDriver) -> npt.NDArray[Any]:
        """Return the memory itself, for a kernel."""
        shadow = self._shadow
        extent = sum((size - 1) * stride for size, stride in zip(shadow.shape, shadow.strides, strict=True))
        memory = driver.memory(shadow.ctypes.data, (extent + shadow.itemsize,), np.uint8)
        content: npt.NDArray[Any] = np.ndarray(shadow.shape, shadow.dtype, memory.data, 0, shadow.strides)
        return content

    def __getitem__(self, index: Any) -> FakeArray:
        return type(self)(self._library, self._shadow[index], self.device, self._owner)

    def __setitem__(self, index: Any, values: FakeArray) -> None:
        self[index].copy_(values)

    def copy_(self, values: FakeArray) -> None:
        """Copy another array to this one, on the current stream."""
        self._library.launch(lambda source, target: np.copyto(target, source), values, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(kDLCUDA, device)``."""
        return 2, self.device

    def __dlpack__(self, **wanted: Any) -> Any:
        """Return a capsule over this memory; the consumer's stream waits for this library's current one."""
        described = DeviceArray(
            self._library.runtime,
            self._shadow.ctypes.data,
            self.shape,
            self.dtype,
            self.device,
            self,
            written_on=self._library.streams[-1],
        )
        return described.__dlpack__(**wanted)


class _ByDlpack:
    """A value as the array of a stranger, which has DLPack and nothing else."""

    def __init__(self, value: Any) -> None:
        self.__dlpack__ = value.__dlpack__
        self.__dlpack_device__ = value.__dlpack_device__
