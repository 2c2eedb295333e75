"""The GPU that is checked, as every process of the check sees it, and the machine, for the report."""

from __future__ import annotations

import contextlib
import platform
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Final

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
from .kernels import Kernels, load_kernels
from .report import CheckFailedError

WAITS: Final = ("synchronize_event", "synchronize_device")
"""How a host waits for a GPU without a bound."""
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_COUNTED: Final = ("open", "close", "pin", "unpin", "copy", "record_device", *WAITS)


@dataclass(frozen=True)
class Gpu:
    access: CudaAccess
    kernels: Kernels  # what is done on it
    is_fake: bool = False  # whether it is no GPU at all

    @property
    def runtime(self) -> CudaRuntime:
        return self.access.runtime

    @cached_property
    def counts(self) -> Counter[str]:
        """How often the runtime has done some things, by its methods' names, since this was asked for first."""
        counts: Counter[str] = Counter()

        def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call_and_count(*arguments: Any) -> Any:
                result = method(*arguments)
                counts[name] += 1
                return result

            return call_and_count

        vars(self.runtime).update({name: counting(name, getattr(self.runtime, name)) for name in _COUNTED})
        return counts

    @cached_property
    def stream(self) -> int:
        """A stream of GPU 0, for what the check itself copies."""
        return self.runtime.create_stream(0)

    def destroy_stream(self) -> None:
        """Let :attr:`stream` go, when what is on it is done; asking for it again makes another."""
        stream = vars(self).pop("stream", None)
        if stream is not None:
            self.runtime.destroy_stream(stream, 0)

    def described(self, value: Any) -> DeviceArray:
        """Return what an array of any library is; :attr:`stream` waits for what that library has on its own."""
        found = imported(self.runtime, value, self.stream)
        if not isinstance(found, DeviceArray):
            raise CheckFailedError(f"an array is not contiguous: {found}")
        return found

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
    if library != "neither":
        install_fakes()
    access = CudaAccess()
    return Gpu(access, load_kernels(library, access.runtime), is_fake=True)


def device_name(device: int) -> str:
    name: bytes = _ask("cuDeviceGetName", 256, _ask("cuDeviceGet", device))
    return name.split(b"\0")[0].decode()


def used_bytes(runtime: CudaRuntime) -> int:
    with runtime.on(0):
        free, total = _ask("cuMemGetInfo")
    return int(total) - int(free)


def pool_memory(runtime: CudaRuntime, count: int) -> DeviceArray:
    """Return FP32 in memory of GPU 0's pool (``cuMemAllocAsync``), which has no IPC handle. It is never freed."""
    with runtime.on(0):
        address = int(_ask("cuMemAllocAsync", count * 4, 0))
        runtime.synchronize_stream(0, 0)
    return DeviceArray(runtime, address, (count,), np.dtype(np.float32), 0, None)


def _ask(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver  # noqa: PLC0415  # where a runtime is, it is too

    error, *found = getattr(driver, name)(*arguments)
    if error:
        raise CudaError(f"asking for {name}", error.name)
    return found[0] if len(found) == 1 else found


def describe(runtime: CudaRuntime, date: str) -> dict[str, str]:
    count, cuda = runtime.device_count(), int(_ask("cuDriverGetVersion"))
    gibibytes = runtime.total_bytes(0) / 2**30
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_if_there(_DRIVER_FILE))
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
