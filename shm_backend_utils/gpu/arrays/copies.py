"""Copies on a stream, from GPU to GPU or between a GPU and the host; and new arrays on GPUs."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import TensorError
from ..errors import CudaError
from ..memory.allocations import OwnMemory
from ..runtime import CudaRuntime
from .device_array import DeviceArray, StridedArray
from .pieces import Plan, plan

__all__ = ["MAX_PIECES", "Array", "copy", "copy_of", "new_array"]

MAX_PIECES: Final = 4096
"""This number of copies takes some 10 ms."""

OnGpu = DeviceArray | StridedArray
Array = DeviceArray | StridedArray | npt.NDArray[Any]


def copy(runtime: CudaRuntime, target: Array, source: Array, stream: int, *, tensor: str = "") -> None:
    """Copy an array to another one of the same shape, on a stream. The stream waits until a DeviceArray is written.

    At least one array is on a GPU, and both must live until the copy is made. If the host array is not pinned or not
    C-contiguous, the copy is complete on return; otherwise when the stream reaches it. A default stream belongs to the
    target's GPU, or else to the source's. TensorError, which names the tensor, for more than 4096 pieces.
    """
    if target.shape != source.shape or target.dtype.itemsize != source.dtype.itemsize:
        raise TensorError(
            tensor,
            f"{_called(tensor)} of shape {source.shape} and type {source.dtype} cannot be copied to one of shape "
            f"{target.shape} and type {target.dtype}",
        )
    if not target.size:
        return
    if isinstance(target, np.ndarray):
        assert not isinstance(source, np.ndarray)
        _download(runtime, target, source, stream, tensor)
    elif isinstance(source, np.ndarray):
        _upload(runtime, target, source, stream, tensor)
    else:
        _put_on(runtime, target, source, stream, target.device, tensor)


def new_array(runtime: CudaRuntime, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
    """Return a new array, not cleared, that owns its memory; CudaError if the GPU has no memory left."""
    byte_size = math.prod(shape) * dtype.itemsize
    memory = OwnMemory(runtime, max(byte_size, 1), device)
    return DeviceArray(runtime, memory.address, shape, dtype, device, memory)


def copy_of(array: DeviceArray) -> DeviceArray:
    """Return a copy with its own memory, after waiting for all present work of the GPU."""
    runtime, device = array.runtime, array.device
    made = new_array(runtime, array.shape, array.dtype, device)
    runtime.wait_beside_captures(device)
    stream = runtime.create_stream(device)
    try:
        copy(runtime, made, array, stream)
        runtime.synchronize_stream(stream, device)
    finally:
        runtime.destroy_stream(stream, device)
    return made


def _upload(runtime: CudaRuntime, target: OnGpu, source: npt.NDArray[Any], stream: int, tensor: str) -> None:
    packed = source if source.flags.c_contiguous else np.ascontiguousarray(source)
    gpu = _put_on(runtime, target, packed, stream, target.device, tensor)
    if packed is not source or not _is_pinned(runtime, packed):
        runtime.synchronize_stream(stream, gpu)


def _download(runtime: CudaRuntime, target: npt.NDArray[Any], source: OnGpu, stream: int, tensor: str) -> None:
    landing = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
    gpu = _put_on(runtime, landing, source, stream, source.device, tensor)
    if landing is not target or not _is_pinned(runtime, landing):
        runtime.synchronize_stream(stream, gpu)
    if landing is not target:
        np.copyto(target, landing)


def _put_on(runtime: CudaRuntime, target: Array, source: Array, stream: int, device: int, tensor: str) -> int:
    """Queue a copy, and return the stream's GPU."""
    planned = plan(target.shape, target.strides, source.strides, target.dtype.itemsize)
    _check_count(planned, source, tensor)
    gpu = runtime.stream_device(stream, device)
    for array in (target, source):
        if isinstance(array, DeviceArray):
            array.let_wait(stream, gpu)
    with runtime.on(gpu):  # the driver may wait for memory of the host
        try:
            _queue(runtime, planned, _address_of(target), _address_of(source), stream)
        except CudaError as error:
            if planned.height == 1 or error.name != "CUDA_ERROR_INVALID_VALUE":
                raise
            planned = planned.by_rows()  # the GPU may refuse a pitch that others take
            _check_count(planned, source, tensor)
            _queue(runtime, planned, _address_of(target), _address_of(source), stream)
    return gpu


def _check_count(planned: Plan, source: Array, tensor: str) -> None:
    if planned.count > MAX_PIECES:
        raise TensorError(
            tensor,
            f"{_called(tensor)} of shape {source.shape} and strides {source.strides} needs {planned.count} copies, "
            f"more than {MAX_PIECES}; make it contiguous, for example by tensor.contiguous() or "
            "cupy.ascontiguousarray(array)",
        )


def _queue(runtime: CudaRuntime, planned: Plan, target: int, source: int, stream: int) -> None:
    for piece in planned.pieces():
        to, by = target + piece.target, source + piece.source
        if planned.height == 1:
            runtime.copy(to, by, planned.width, stream)
        else:
            runtime.copy_rows(to, planned.target_pitch, by, planned.source_pitch, planned.width, planned.height, stream)


def _address_of(array: Array) -> int:
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else array.address


def _is_pinned(runtime: CudaRuntime, host: npt.NDArray[Any]) -> bool:
    return runtime.pointer(host.ctypes.data).kind == "pinned"


def _called(tensor: str) -> str:
    return f"tensor {tensor!r}" if tensor else "an array"
