"""What users pass as inputs that are on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ... import dtypes
from ...memory.cuda.memory import CudaAccess
from ...memory.cuda.runtime import CudaRuntime, device_guard
from ...model_spec import ModelSpec
from .sources import Source, sources

__all__ = ["DeviceSource", "copy_on_device", "is_on_device", "sources_anywhere"]

_CUDA: Final = frozenset({2, 13})  # dlpack.h: kDLCUDA, and kDLCUDAManaged, which CUDA can copy from as well


class DeviceSource(Source):
    """One input on a GPU.

    Attributes
    ----------
    device : int
        This process' number of the GPU.
    """

    __slots__ = ("_array", "_runtime", "device")

    device: int

    def __init__(self, name: str, array: Any, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._array = array
        self.device = device
        dtype, shape = dtypes.from_numpy(np.dtype(array.dtype), name), tuple(array.shape)
        super().__init__(dtype, shape, math.prod(shape) * dtype.itemsize, ())

    @classmethod
    def adopt(cls, name: str, value: Any, cuda: CudaAccess) -> DeviceSource:
        """Return whatever has DLPack on a GPU as a source."""
        return cls(name, cuda.runtime.adopt(value), cuda.runtime, int(value.__dlpack_device__()[1]))

    def write_to(self, target: Any) -> None:
        """Copy the tensor, once, to the host or to a GPU; it is complete then."""
        copy_on_device(self._runtime, self.device, target, self._array)


def copy_on_device(runtime: CudaRuntime, device: int, target: Any, source: Any) -> None:
    """Copy between arrays of which one is on this device, after what is on the thread's current stream; wait for it."""
    with device_guard(runtime, device):
        stream = runtime.stream_address(runtime.current_stream())
        runtime.copy(target, source, stream)
        runtime.synchronize(stream)


def sources_anywhere(spec: ModelSpec, inputs: Mapping[str, Any], cuda: CudaAccess) -> dict[str, Source]:
    """Look at every input of a call, as :func:`sources` does, which knows the host alone."""
    on_device = {name: DeviceSource.adopt(name, value, cuda) for name, value in inputs.items() if is_on_device(value)}
    if not on_device:
        return sources(spec, inputs)
    on_host = sources(spec, {name: value for name, value in inputs.items() if name not in on_device})
    return {name: on_device.get(name) or on_host[name] for name in inputs}


def is_on_device(value: Any) -> bool:
    """Return whether an input is an array on a GPU."""
    if type(value) is np.ndarray or not hasattr(value, "__dlpack_device__"):
        return False
    return int(value.__dlpack_device__()[0]) in _CUDA
