"""What the check has a GPU do: by CuPy, by PyTorch, or by neither, which is by the driver's own copies.

Arrays are one-dimensional, of FP32. A model has a copy of this file, so it imports nothing of the check.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import named_stream

LIBRARIES: Final = {"cupy": "CuPy", "torch": "PyTorch", "neither": "neither CuPy nor PyTorch"}
"""What kernels are by, in words."""
CAPTURE_MODES: Final = ("GLOBAL", "THREAD_LOCAL", "RELAXED")

_OPEN, _PROCESS = range(2)  # words of a gate

Numbers = npt.NDArray[np.float32]
Kernels: TypeAlias = "_CupyKernels | _TorchKernels | _PlainKernels"


def ask(name: str, *arguments: Any) -> Any:
    """Call a function of the driver and return its result; CudaError if it fails."""
    from cuda.bindings import driver  # noqa: PLC0415  # where a runtime is, it is too

    error, *found = getattr(driver, name)(*arguments)
    if error:
        raise CudaError(name, error.name)
    return found[0] if len(found) == 1 else found or None


class Gate:
    """Words of host memory that all processes share: while the gate is closed, no stream goes on that it holds."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("r+b") as opened:
            self._words = np.frombuffer(mmap.mmap(opened.fileno(), mmap.PAGESIZE), np.uint64)
        self._is_registered = False

    @classmethod
    def create(cls) -> Gate:
        """Make a gate that is open; its file lasts as long as this process."""
        descriptor = os.memfd_create("gate")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        gate = cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
        gate._words[_OPEN] = 1
        return gate

    @contextlib.contextmanager
    def closed(self) -> Iterator[Gate]:
        """Close the gate for a block. No stream may be held that was held before."""
        self._words[_PROCESS] = self._words[_OPEN] = 0
        try:
            yield self
        finally:
            self._words[_OPEN] = 1

    def hold(self, runtime: CudaRuntime, stream: Any, device: int) -> None:
        """Hold what a stream does from now on, until the gate is open (``cuStreamWaitValue64``)."""
        address = self._words.ctypes.data
        if not self._is_registered:
            runtime.pin(address, mmap.PAGESIZE)
            self._is_registered = True
        with runtime.on(device):
            ask("cuStreamWaitValue64", named_stream(stream).handle, address, 1, 0)  # until it is 1 or more

    def has_launched(self) -> None:
        """Tell that all work of a request was launched in this process."""
        self._words[_PROCESS] = os.getpid()

    @property
    def launched_by(self) -> int:
        """The process that has launched all work of a request since the gate was closed; 0 if none has."""
        return int(self._words[_PROCESS])


class Capture:
    """The capture of a stream into a graph by another thread, from now until :meth:`end`."""

    def __init__(self, runtime: CudaRuntime, mode: str, *, is_blocking: bool = False) -> None:
        self._ends, self._has_begun = threading.Event(), threading.Event()
        self._error = "it has not begun"
        flags = 0 if is_blocking else 1  # CU_STREAM_NON_BLOCKING
        self._thread = threading.Thread(target=self._run, args=(runtime, mode, flags))
        self._thread.start()
        self._has_begun.wait()

    def end(self) -> str:
        """End the capture; return CUDA's name of what went wrong, or nothing."""
        self._ends.set()
        self._thread.join()
        return self._error

    def _run(self, runtime: CudaRuntime, mode: str, flags: int) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # where the runtime is, it is too

        try:
            runtime.make_current(0)  # not runtime.on(), which would relax this thread's mode
            stream, memory = ask("cuStreamCreate", flags), ask("cuMemAlloc", 4)
            number = getattr(driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
            ask("cuStreamBeginCapture", stream, number)
            self._has_begun.set()
            self._ends.wait()
            with contextlib.suppress(CudaError):  # the end tells why
                ask("cuMemsetD32Async", memory, 1, 1, stream)
            ask("cuGraphDestroy", ask("cuStreamEndCapture", stream))
            ask("cuMemFree", memory)
            ask("cuStreamDestroy", stream)
            self._error = ""
        except CudaError as error:
            self._error = error.name
        finally:
            self._has_begun.set()


class Pitched:
    """Numbers that are a pitch apart, as an array of no known library."""

    def __init__(self, owner: Any, address: int, count: int, pitch: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "strides": (pitch,),
        }


def load_kernels(name: str, runtime: CudaRuntime) -> Kernels:
    if name == "cupy":
        return _CupyKernels()
    return _TorchKernels() if name == "torch" else _PlainKernels(runtime)


class _CupyKernels:
    name = "cupy"

    def __init__(self) -> None:
        import cupy  # noqa: PLC0415  # only where it was asked for

        self._cupy: Any = cupy

    def stream(self, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.cuda.Stream(non_blocking=True)

    def tensor(self, count: int, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            return self._cupy.empty(count, np.float32)

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        """Write y from x, by one kernel."""
        with self._cupy.cuda.Device(y.device), stream:
            self._cupy.multiply(x.cupy(), 2, out=y.cupy())

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers * 2


class _TorchKernels:
    name = "torch"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  # takes seconds

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch sees no GPU")
        self._torch: Any = torch

    def stream(self, device: int) -> Any:
        return self._torch.cuda.Stream(device=device)

    def tensor(self, count: int, device: int) -> Any:
        return self._torch.empty(count, dtype=self._torch.float32, device=f"cuda:{device}")

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        with self._torch.cuda.stream(stream):  # it makes its device current, too
            self._torch.mul(self._torch.from_dlpack(x), 2, out=self._torch.from_dlpack(y))

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers * 2


class _PlainKernels:
    name = "neither"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def stream(self, device: int) -> Any:
        return self._runtime.create_stream(device)  # lives as long as the process

    def quick(self, x: DeviceArray, y: DeviceArray, stream: Any) -> None:
        x.let_wait(stream, y.device)
        with self._runtime.on(y.device):
            self._runtime.copy(y.address, x.address, y.nbytes, stream)

    def after_quick(self, numbers: Numbers) -> Numbers:
        return numbers

    def tensor(self, count: int, device: int) -> Any:
        block = CudaAllocation(self._runtime, count * 4, device)
        return DeviceArray(self._runtime, block.address, (count,), np.dtype(np.float32), device, block.keeper)
