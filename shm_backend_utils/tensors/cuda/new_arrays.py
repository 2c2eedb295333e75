"""Arrays on a GPU with memory of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...memory.cuda.allocations import CudaAllocation
from ...memory.cuda.runtime import CudaRuntime
from .copies import copy
from .device_array import DeviceArray

__all__ = ["copy_of", "new_array"]


def new_array(runtime: CudaRuntime, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
    """Return an array that is not cleared, and whose memory goes with it; CudaError if there is none."""
    byte_size = math.prod(shape) * dtype.itemsize
    allocation = CudaAllocation(runtime, max(byte_size, 1), device)
    return DeviceArray(runtime, allocation.address, shape, dtype, device, allocation.keeper)


def copy_of(array: DeviceArray) -> DeviceArray:
    """Return a copy with memory of its own, made after all that the GPU has to do now. Waits for that."""
    runtime, device = array.runtime, array.device
    made = new_array(runtime, array.shape, array.dtype, device)
    runtime.synchronize_device(device)
    stream = runtime.create_stream(device)
    try:
        copy(runtime, made, array, stream)
        runtime.synchronize_stream(stream, device)
    finally:
        runtime.destroy_stream(stream, device)
    return made
