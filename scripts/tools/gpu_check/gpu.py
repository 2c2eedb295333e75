"""The GPU that is checked, as every process of the check sees it, and the machine, for the report."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

from ..processes import read_if_there
from .fakes import install_fakes
from .kernels import Kernels, ask, load_kernels
from .report import CheckFailedError


@dataclass(frozen=True)
class Gpu:
    access: CudaAccess
    kernels: Kernels  # what is done on it
    is_fake: bool = False  # whether it is no GPU at all

    @property
    def runtime(self) -> CudaRuntime:
        return self.access.runtime

    @cached_property
    def stream(self) -> int:
        """A stream of GPU 0, for what the check itself copies."""
        return self.runtime.create_stream(0)

    def described(self, value: Any) -> DeviceArray:
        """Return what an array of any library is; :attr:`stream` waits for what that library has on its own."""
        found = imported(self.runtime, value, self.stream)
        if not isinstance(found, DeviceArray):
            raise CheckFailedError(f"an array is not contiguous: {found}")
        return found

    def new(self, count: int) -> DeviceArray:
        """Return memory of GPU 0 that the library has allocated, not cleared."""
        return self.described(self.kernels.tensor(count, 0))

    def settle(self) -> None:
        """Wait for all that this process has on GPU 0."""
        with self.runtime.on(0):
            ask("cuCtxSynchronize")

    def is_idle(self, stream: int) -> bool:
        """Return whether all is done that is on a stream."""
        try:
            with self.runtime.on(0):
                ask("cuStreamQuery", stream)
        except CudaError as error:
            if error.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def upload(self, array: DeviceArray, values: npt.NDArray[Any]) -> None:
        """Fill an array, and wait until that is done."""
        self._copy(array.device, array.address, np.ascontiguousarray(values).ctypes.data, array.nbytes)

    def download(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Return a copy on the host, of what is there now: nothing is waited for."""
        values = np.empty(array.shape, array.dtype)
        self._copy(array.device, values.ctypes.data, array.address, array.nbytes)
        return values

    def _copy(self, device: int, target: int, source: int, byte_size: int) -> None:
        stream = self.stream if device == 0 else self.runtime.create_stream(device)
        with self.runtime.on(device):
            self.runtime.copy(target, source, byte_size, stream)
        self.runtime.synchronize_stream(stream, device)


LoadGpu = Callable[[], Gpu]
"""Makes a process' Gpu; a function at the top of a module, or a partial of one, so that a new process can be told."""


def load_gpu(library: str) -> Gpu:
    """Return the real GPU; MachineError if there is none, ImportError if the library is missing, or sees none."""
    access = CudaAccess()
    runtime = access.runtime
    if "fake" in device_name(0):
        raise MachineError(f"what is found as a driver is a {device_name(0)}; --rehearse is for that")
    runtime.make_current(0)
    return Gpu(access, load_kernels(library, runtime))


def load_fake_gpu(library: str) -> Gpu:
    FakeDriver.load()
    access = CudaAccess()
    if library != "neither":
        install_fakes(access.runtime)
    return Gpu(access, load_kernels(library, access.runtime), is_fake=True)


def device_name(device: int) -> str:
    name: bytes = ask("cuDeviceGetName", 256, ask("cuDeviceGet", device))
    return name.split(b"\0")[0].decode()


def used_bytes(runtime: CudaRuntime) -> int:
    with runtime.on(0):
        free, total = ask("cuMemGetInfo")
    return int(total) - int(free)


def describe(runtime: CudaRuntime, date: str) -> dict[str, str]:
    count, cuda = runtime.device_count(), int(ask("cuDriverGetVersion"))
    gibibytes = runtime.total_bytes(0) / 2**30
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_if_there(Path("/proc/driver/nvidia/version")))
    return {
        "date": date,
        "GPU": f"{device_name(0)}, {gibibytes:.0f} GiB{f' (the first of {count})' if count > 1 else ''}",
        "driver": driver[0] if driver else "unknown",
        "CUDA of the driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "cuda-bindings": _version_of("cuda-bindings"),
        "CuPy": _version_of("cupy-cuda13x", "cupy-cuda12x", "cupy"),  # which differ by CUDA's version
        "PyTorch": _version_of("torch"),
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _version_of(*packages: str) -> str:
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}" if len(packages) > 1 else metadata.version(package)
    return "not installed"
