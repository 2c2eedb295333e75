"""The GPU that is checked, as every process of the check sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.region.cuda import CudaAccess
from shm_backend_utils.region.cuda_runtime import CudaRuntime

__all__ = ["Gpu", "LoadGpu", "load_gpu"]


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
    """

    access: CudaAccess
    cupy: Any
    import_torch: Callable[[], Any]

    @property
    def runtime(self) -> CudaRuntime:
        """The runtime."""
        return self.access.runtime

    def double(self, x: Any, y: Any) -> None:
        """Launch the kernel of the model gpu_multiply on the current stream."""
        self.cupy.multiply(x, 2, out=y)

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

    return Gpu(access, cupy, _import_torch)


def _import_torch() -> Any:
    import torch  # noqa: PLC0415  # takes seconds

    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    return torch
