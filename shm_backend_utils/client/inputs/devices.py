"""What users pass as inputs that are on a GPU."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ... import dtypes
from ...memory.cuda.memory import CudaAccess
from ...memory.cuda.runtime import CudaRuntime, device_guard
from .sources import Source

__all__ = ["DeviceSource", "copy_on_device", "device_source", "is_on_device"]

_CUDA: Final = frozenset({2, 13})  # dlpack.h: kDLCUDA, and kDLCUDAManaged, which CUDA can copy from as well


class DeviceSource(Source):
    """One input on a GPU."""

    __slots__ = ("_array", "_runtime")

    def __init__(self, name: str, array: Any, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._array = array
        dtype, shape = dtypes.from_numpy(np.dtype(array.dtype), name), tuple(array.shape)
        super().__init__(dtype, shape, math.prod(shape) * dtype.itemsize, (), device)

    def write_to(self, target: Any) -> None:
        """Copy the tensor, once, to the host or to a GPU; it is complete then."""
        assert self.device is not None
        copy_on_device(self._runtime, self.device, target, self._array)


def copy_on_device(runtime: CudaRuntime, device: int, target: Any, source: Any) -> None:
    """Copy between arrays of which one is on this device, after what is on the thread's current stream; wait for it."""
    with device_guard(runtime, device):
        stream = runtime.stream_address(runtime.current_stream())
        runtime.copy(target, source, stream)
        runtime.synchronize(stream)


def device_source(cuda: CudaAccess, name: str, value: Any) -> DeviceSource | None:
    """Return whatever has DLPack on a GPU as a source; None for what is not on one."""
    if not is_on_device(value):
        return None
    return DeviceSource(name, cuda.runtime.adopt(value), cuda.runtime, int(value.__dlpack_device__()[1]))


def is_on_device(value: Any) -> bool:
    """Return whether an input is an array on a GPU."""
    if type(value) is np.ndarray or not hasattr(value, "__dlpack_device__"):
        return False
    return int(value.__dlpack_device__()[0]) in _CUDA
