"""The GPU that is checked, as every process of the check sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime

from .kernels import Kernels, load_kernels
from .machine import device_name
from .report import require

_COUNTED: Final = (
    "open",
    "close",
    "pin",
    "unpin",
    "copy",
    "synchronize_stream",
    "synchronize_device",
    "is_event_done",
    "record_device",
)
WAITS: Final = ("synchronize_stream", "synchronize_device")
"""How a host waits for a GPU without a bound."""


class CallCounts:
    """How often a runtime did some things for this package since this was made."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._counts: Counter[str] = Counter()
        vars(runtime).update({name: self._counting(name, getattr(runtime, name)) for name in _COUNTED})

    def so_far(self) -> Counter[str]:
        """Return the counts by the names of the runtime's methods. A copy."""
        return self._counts.copy()

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_count(*arguments: Any) -> Any:
            result = method(*arguments)
            self._counts[name] += 1
            return result

        return call_and_count


@dataclass(frozen=True)
class Gpu:
    """CUDA in this process."""

    access: CudaAccess
    kernels: Kernels  # what is done on it
    # returns tritonclient's module of that name; raises ImportError if it cannot be used
    import_cuda_shared_memory: Callable[[], Any]
    is_fake: bool = False  # whether it is no GPU at all

    @property
    def runtime(self) -> CudaRuntime:
        """The runtime."""
        return self.access.runtime

    @cached_property
    def counts(self) -> CallCounts:
        """What the runtime has done since this was asked for first."""
        return CallCounts(self.runtime)

    @cached_property
    def stream(self) -> int:
        """A stream of GPU 0, for what the check itself copies."""
        return self.runtime.create_stream(0)

    def destroy_stream(self) -> None:
        """Let :attr:`stream` go, when what is on it is done; whoever asks for it again gets another."""
        stream = vars(self).pop("stream", None)
        if stream is not None:
            self.runtime.destroy_stream(stream, 0)

    def stream_of(self, device: int) -> int:
        """Return :attr:`stream`, or a new one of another GPU."""
        return self.stream if device == 0 else self.runtime.create_stream(device)

    def described(self, value: Any) -> DeviceArray:
        """Return what an array of any library is; :attr:`stream` waits for what that library has on its own."""
        found = imported(self.runtime, value, self.stream)
        require(isinstance(found, DeviceArray), f"an array is not contiguous: {found}")
        assert isinstance(found, DeviceArray)
        return found

    def upload(self, array: DeviceArray, values: npt.NDArray[Any]) -> None:
        """Fill an array; it is complete then."""
        self._copy(array.device, array.address, np.ascontiguousarray(values).ctypes.data, array.nbytes)

    def download(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Return a copy on the host, of what is there now: nothing is waited for."""
        values = np.empty(array.shape, array.dtype)
        self._copy(array.device, values.ctypes.data, array.address, array.nbytes)
        return values

    def _copy(self, device: int, target: int, source: int, byte_size: int) -> None:
        stream = self.stream_of(device)
        with self.runtime.on(device):
            self.runtime.copy(target, source, byte_size, stream)
        self.runtime.synchronize_stream(stream, device)


LoadGpu = Callable[[], Gpu]
"""Makes a process' Gpu; a function at the top of a module, or a partial of one, so that a new process can be told."""


def load_gpu(library: str) -> Gpu:
    """Return the real GPU.

    Raises MachineError: the bindings, the driver or a GPU are missing, or the driver is a fake. Raises
    ImportError: the library is missing, or sees no GPU.
    """
    access = CudaAccess()
    runtime = access.runtime
    if "fake" in device_name(0):
        raise MachineError(f"what is found as a driver is a {device_name(0)}; --rehearse is for that")
    runtime.make_current(0)
    return Gpu(access, load_kernels(library, runtime), _import_cuda_shared_memory)


def _import_cuda_shared_memory() -> Any:
    try:
        from tritonclient.utils import cuda_shared_memory  # noqa: PLC0415  # needs more than tritonclient does
    except RuntimeError as error:  # it lacks its Python bindings of CUDA
        raise ImportError(str(error)) from None
    return cuda_shared_memory
