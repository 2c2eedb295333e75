"""What the check has a GPU do: by CuPy, by PyTorch, or by neither, which is by the driver's own fills and copies.

Arrays are one-dimensional, of FP32; streams are what users of the library hold. ``quick`` is one kernel that writes y
from x. ``late`` is many, the last of which completes y: who reads it too early sees something else. A model of level 2
has a copy of this file, so it imports nothing of the check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime

LATE_STEPS: Final = 200
"""Kernels of late work: fewer than CUDA lets a stream have waiting."""
LIBRARIES: Final = {"cupy": "CuPy", "torch": "PyTorch", "neither": "neither CuPy nor PyTorch"}
"""What kernels are by, in words."""

Numbers = npt.NDArray[np.float32]
Kernels: TypeAlias = "_CupyKernels | _TorchKernels | _PlainKernels"


def load_kernels(name: str, runtime: CudaRuntime) -> Kernels:
    if name == "cupy":
        return _CupyKernels()
    return _TorchKernels() if name == "torch" else _PlainKernels(runtime)


class _LibraryKernels:
    add: Any
    multiply: Any
    current: Any  # makes a stream the library's own for a block
    taken: Any  # returns an array of the library's

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self.current(stream, y.device):
            self.multiply(self.taken(x), 2, out=self.taken(y))

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self.current(stream, y.device):
            result = self.taken(y)
            self.add(self.taken(x), 1, out=result)
            for _ in range(LATE_STEPS - 1):
                self.add(result, 1, out=result)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers * 2

    def after_late(self, numbers: Numbers) -> Numbers:
        return numbers + LATE_STEPS


class _CupyKernels(_LibraryKernels):
    name = "cupy"

    def __init__(self) -> None:
        import cupy  # noqa: PLC0415  # only where it was asked for

        self._cupy: Any = cupy
        self.add, self.multiply, self.taken = cupy.add, cupy.multiply, DeviceArray.cupy
        self.current = self._current

    def stream(self, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def _current(self, stream: Any, device: int) -> Iterator[None]:
        with self._cupy.cuda.Device(device), stream:
            yield

    def tensor(self, count: int, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.empty(count, np.float32)


class _TorchKernels(_LibraryKernels):
    name = "torch"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  # takes seconds

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch sees no GPU")
        self._torch: Any = torch
        self.add, self.multiply, self.taken = torch.add, torch.mul, self._torch.from_dlpack
        self.current = lambda stream, device: torch.cuda.stream(stream)  # it makes its device current, too

    def stream(self, device: int) -> Any:
        return self._torch.cuda.Stream(device=device)

    def tensor(self, count: int, device: int) -> Any:
        return self._torch.empty(count, dtype=self._torch.float32, device=f"cuda:{device}")


class _PlainKernels:
    name = "neither"

    def __init__(self, runtime: CudaRuntime) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # where the runtime is, it is too

        self._driver: Any = driver
        self._runtime = runtime

    def stream(self, device: int) -> Any:
        return self._runtime.create_stream(device)  # lives as long as the process

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        self._fill_and_copy(x, y, stream, 0)

    def late(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        self._fill_and_copy(x, y, stream, LATE_STEPS - 1)

    def _fill_and_copy(self, x: DeviceArray, y: DeviceArray, stream: Any, fills: int) -> None:
        x.let_wait(stream, y.device)
        with self._runtime.on(y.device):
            for step in range(fills):
                (error,) = self._driver.cuMemsetD32Async(y.address, step, y.size, stream)
                if error:
                    raise RuntimeError(f"cuMemsetD32Async failed with {error.name}")
            self._runtime.copy(y.address, x.address, y.nbytes, stream)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers

    after_late = after_quick

    def tensor(self, count: int, device: int) -> Any:
        block = CudaAllocation(self._runtime, count * 4, device)
        return DeviceArray(self._runtime, block.address, (count,), np.dtype(np.float32), device, block.keeper)
