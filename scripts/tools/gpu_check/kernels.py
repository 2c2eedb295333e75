"""What the check has a GPU do: by CuPy, by PyTorch, or by neither, which is by the driver's own fills and copies.

A model of level 2 has a copy of this file, so it imports nothing of the check.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime

LIBRARIES: Final = ("cupy", "torch", "neither")
LATE_STEPS: Final = 200
"""Kernels of late work: fewer than CUDA lets a stream have waiting."""

Numbers = npt.NDArray[np.float32]


class Kernels(Protocol):
    """Work for a GPU. Arrays are one-dimensional, of FP32; streams are what users of the library hold."""

    name: str  # one of :data:`LIBRARIES`
    in_words: str

    def stream(self, device: int) -> Any:
        """Return a new stream, as users of this library hold one."""

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        """Launch one kernel that writes y from x."""

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        """Launch many, the last of which completes y: who reads it too early sees something else."""

    def after_quick(self, numbers: Numbers) -> Numbers:
        """Return what :meth:`quick` makes of them."""

    def after_late(self, numbers: Numbers) -> Numbers:
        """Return what :meth:`late` makes of them."""

    def tensor(self, count: int, device: int) -> Any:
        """Return a new array of this library's, with FP32, in memory that the library has allocated."""


def load_kernels(name: str, runtime: CudaRuntime) -> Kernels:
    """Return those of a library; ImportError says why it cannot be used here."""
    if name == "cupy":
        return _CupyKernels()
    if name == "torch":
        return _TorchKernels()
    return _PlainKernels(runtime)


class _CupyKernels:
    name = "cupy"
    in_words = "CuPy"

    def __init__(self) -> None:
        import cupy  # noqa: PLC0415  # only where it was asked for

        self._cupy: Any = cupy

    def stream(self, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.cuda.Stream(non_blocking=True)

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self._cupy.cuda.Device(y.device), stream:
            self._cupy.multiply(x.cupy(), 2, out=y.cupy())

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self._cupy.cuda.Device(y.device), stream:
            result = y.cupy()
            self._cupy.add(x.cupy(), 1, out=result)
            for _ in range(LATE_STEPS - 1):
                self._cupy.add(result, 1, out=result)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers * 2

    def after_late(self, numbers: Numbers) -> Numbers:
        return numbers + LATE_STEPS

    def tensor(self, count: int, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.empty(count, np.float32)


class _TorchKernels:
    name = "torch"
    in_words = "PyTorch"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  # takes seconds

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch sees no GPU")
        self._torch: Any = torch

    def stream(self, device: int) -> Any:
        return self._torch.cuda.Stream(device=device)

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self._torch.cuda.stream(stream):  # it makes its device current, too
            self._torch.mul(self._torch.from_dlpack(x), 2, out=self._torch.from_dlpack(y))

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            result = self._torch.from_dlpack(y)
            self._torch.add(self._torch.from_dlpack(x), 1, out=result)
            for _ in range(LATE_STEPS - 1):
                self._torch.add(result, 1, out=result)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers * 2

    def after_late(self, numbers: Numbers) -> Numbers:
        return numbers + LATE_STEPS

    def tensor(self, count: int, device: int) -> Any:
        return self._torch.empty(count, dtype=self._torch.float32, device=f"cuda:{device}")


class _PlainKernels:
    name = "neither"
    in_words = "neither CuPy nor PyTorch"

    def __init__(self, runtime: CudaRuntime) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # where the runtime is, it is too

        self._driver: Any = driver
        self._runtime = runtime

    def stream(self, device: int) -> Any:
        return self._runtime.create_stream(device)  # lives as long as the process

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        x.let_wait(stream, y.device)
        with self._runtime.on(y.device):
            self._runtime.copy(y.address, x.address, y.nbytes, stream)

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        x.let_wait(stream, y.device)
        with self._runtime.on(y.device):
            for step in range(LATE_STEPS - 1):
                (error,) = self._driver.cuMemsetD32Async(y.address, step, y.size, stream)
                if error:
                    raise RuntimeError(f"cuMemsetD32Async failed with {error.name}")
            self._runtime.copy(y.address, x.address, y.nbytes, stream)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers

    def after_late(self, numbers: Numbers) -> Numbers:
        return numbers

    def tensor(self, count: int, device: int) -> Any:
        block = CudaAllocation(self._runtime, count * 4, device)
        return DeviceArray(self._runtime, block.address, (count,), np.dtype(np.float32), device, block.keeper)
