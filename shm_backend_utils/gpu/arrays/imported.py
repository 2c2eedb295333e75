"""Arrays of any library on a GPU, imported without a copy, by DLPack or CUDA's array interface."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Final

import numpy as np

from ... import dtypes
from ...errors import TensorTypeError
from ...tensors import dlpack
from ...tensors.dlpack import VERSION, c_strides
from ..ordering import OwnStreams, order_after
from ..runtime import LEGACY_STREAM, CudaRuntime
from ..streams import NamedStream
from .capsules import taken_over
from .device_array import DeviceArray, StridedArray
from .device_view import DeviceView

__all__ = ["device_of", "imported", "is_on_gpu"]

_REFUSALS: Final = (BufferError, RuntimeError, TypeError, ValueError, KeyError, AttributeError)
"""Errors of libraries that cannot export a tensor, for example because of gradients or its data type."""


def is_on_gpu(value: Any) -> bool:
    """Return whether this is an array of any library on a GPU."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        with contextlib.suppress(Exception):  # torch's tensors without memory raise ValueError
            return int(value.__dlpack_device__()[0]) in dlpack.ON_GPU
        return False
    return hasattr(value, "__cuda_array_interface__")


def device_of(runtime: CudaRuntime, value: Any, otherwise: int = 0) -> int:
    """Return the number of an array's GPU; :func:`is_on_gpu` must be true for the array.

    The result is ``otherwise`` for an array without elements that does not name its GPU.
    """
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[1])
    address, _ = value.__cuda_array_interface__["data"]
    return runtime.pointer(address).device if address else otherwise


def imported(runtime: CudaRuntime, value: Any, stream: int, *, tensor: str = "") -> DeviceArray | StridedArray:
    """Return any library's array on a GPU as a DeviceArray over the same memory, which it keeps.

    The value may be a DLPack capsule. If it is not C-contiguous, the result is a StridedArray. ``stream`` waits for the
    library's current stream in this thread; you must also wait for the user's streams. It cannot be -1, which some
    libraries reject. TensorTypeError if the library does not export the array, or Triton lacks the data type.
    """
    if isinstance(value, DeviceView):
        value = value.array
    if isinstance(value, DeviceArray):
        value.let_wait(stream, runtime.stream_device(stream, value.device))
        return value
    dlpack.check_is_resolved(value, tensor)
    try:
        return _by_dlpack(runtime, value, stream)
    except _REFUSALS as error:
        refused = error
    try:
        return _by_interface(runtime, value, stream, tensor)
    except _REFUSALS as error:
        called = f"tensor {tensor!r}" if tensor else "an array"
        reason = error if isinstance(refused, AttributeError) else refused  # without __dlpack__, the second error
        raise TensorTypeError(
            tensor,
            f"{called} is a {type(value).__module__}.{type(value).__qualname__} on a GPU, which does not export its "
            f"memory: {reason}",
        ) from reason


def _by_dlpack(runtime: CudaRuntime, value: Any, stream: int) -> DeviceArray | StridedArray:
    if type(value).__name__ == "PyCapsule":
        memory, owner = taken_over(value)
    else:
        with runtime.on(device_of(runtime, value)):  # PyTorch exports arrays of the current device only
            memory, owner = taken_over(_capsule_of(value, stream))
    device = memory.device
    if memory.device_type == dlpack.CUDA_MANAGED and memory.address:  # managed memory has no fixed device
        device = runtime.pointer(memory.address).device
    return _array(
        runtime, memory.address, memory.shape, memory.strides, memory.dtype, device, owner, memory.is_read_only
    )


def _capsule_of(value: Any, stream: int) -> object:
    try:
        return value.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # before 2023.12, the standard had no max_version
        return value.__dlpack__(stream=stream)


def _by_interface(runtime: CudaRuntime, value: Any, stream: int, tensor: str) -> DeviceArray | StridedArray:
    device = device_of(runtime, value)
    with runtime.on(device):  # CuPy returns the stream of the current device
        interface = value.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError("it has a mask")
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    dtype = dtypes.BF16 if typestr in ("<V2", "|V2") else dtypes.from_numpy(typestr, tensor)
    address, is_read_only = interface["data"]
    if address:
        device = runtime.pointer(address).device
    produced_on = interface.get("stream")
    if produced_on is not None:
        writer = NamedStream(int(produced_on) or LEGACY_STREAM, device)
        order_after(OwnStreams(runtime), (writer,), device, stream)
    strides = interface.get("strides") or c_strides(shape, dtype.itemsize)
    return _array(runtime, address, shape, tuple(strides), dtype.numpy, device, value, bool(is_read_only))


def _array(
    runtime: CudaRuntime,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    owner: object,
    is_read_only: bool,
) -> DeviceArray | StridedArray:
    straight = c_strides(shape, dtype.itemsize)
    sizes = zip(shape, strides, straight, strict=True)
    if not math.prod(shape) or all(size == 1 or stride == other for size, stride, other in sizes):
        return DeviceArray(runtime, address, shape, dtype, device, owner, is_read_only=is_read_only)
    return StridedArray(runtime, address, shape, strides, dtype, device, owner, is_read_only)
