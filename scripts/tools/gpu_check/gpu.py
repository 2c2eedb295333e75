"""The GPU that is checked, as every process of the check sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaRuntime

__all__ = ["Gpu", "LoadGpu", "load_gpu"]

_COUNTED: Final = ("open", "close", "pin", "unpin", "synchronize", "is_event_done")


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
    """CUDA in this process.

    Attributes
    ----------
    access : CudaAccess
    cupy : module
        CuPy, or what stands for it.
    import_torch : callable
        Returns PyTorch; raises ImportError if there is none for this GPU.
    import_cuda_shared_memory : callable
        Returns tritonclient's module of that name; raises ImportError likewise.
    is_fake : bool
        Whether it is no GPU at all.
    """

    access: CudaAccess
    cupy: Any
    import_torch: Callable[[], Any]
    import_cuda_shared_memory: Callable[[], Any]
    is_fake: bool = False

    @property
    def runtime(self) -> CudaRuntime:
        """The runtime."""
        return self.access.runtime

    @cached_property
    def counts(self) -> CallCounts:
        """What the runtime has done since this was asked for first."""
        return CallCounts(self.runtime)

    def double(self, x: Any, y: Any) -> None:
        """Launch the kernel of the model gpu_multiply on the current stream."""
        self.cupy.multiply(x, 2, out=y)

    def add_one(self, x: Any, y: Any) -> None:
        """Launch a kernel that adds 1 to all numbers on the current stream."""
        self.cupy.add(x, 1, out=y)

    def upload(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Fill an array on the current device; it is complete then."""
        self.runtime.copy(array, values, self._stream())
        self.wait()

    def download(self, array: Any) -> npt.NDArray[Any]:
        """Return an array of the current device, after what is on the current stream."""
        values = np.empty(array.shape, array.dtype)
        self.runtime.copy(values, array, self._stream())
        self.wait()
        return values

    def array(self, values: npt.NDArray[Any]) -> Any:
        """Return a copy on the current device."""
        array = self.runtime.empty(values.shape, values.dtype)
        self.upload(array, values)
        return array

    def wait(self) -> None:
        """Wait for the current stream."""
        self.runtime.synchronize(self._stream())

    def used_bytes(self) -> int:
        """Return how much memory of the current device is in use, by whomever."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def _stream(self) -> int:
        return self.runtime.stream_address(self.runtime.current_stream())


LoadGpu = Callable[[], Gpu]
"""Makes a process' Gpu; a function at the top of a module, so that a new process can be told of it."""


def load_gpu() -> Gpu:
    """Return the real GPU; raises MachineError if CuPy or a GPU is missing."""
    access = CudaAccess()
    access.runtime.set_device(0)
    import cupy  # noqa: PLC0415  # only now is it certain that there is one

    return Gpu(access, cupy, _import_torch, _import_cuda_shared_memory)


def _import_torch() -> Any:
    import torch  # noqa: PLC0415  # takes seconds

    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    return torch


def _import_cuda_shared_memory() -> Any:
    try:
        from tritonclient.utils import cuda_shared_memory  # noqa: PLC0415  # needs more than tritonclient does
    except RuntimeError as error:  # it lacks its Python bindings of CUDA
        raise ImportError(str(error)) from None
    return cuda_shared_memory
