"""The GPU check asks CUDA's driver, and names what it runs on, for the report."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import CudaRuntime

_MISSING: Final = "not installed"
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def device_name(device: int) -> str:
    """Return the name that CUDA has for a device."""
    name: bytes = _ask("cuDeviceGetName", 256, _ask("cuDeviceGet", device))
    return name.split(b"\0")[0].decode()


def device_bytes(runtime: CudaRuntime, device: int) -> int:
    """Return how much memory a device has."""
    with runtime.on(device):
        return int(_ask("cuMemGetInfo")[1])


def used_bytes(runtime: CudaRuntime, device: int) -> int:
    """Return how much memory of a device is in use, by whomever."""
    with runtime.on(device):
        free, total = _ask("cuMemGetInfo")
    return int(total) - int(free)


def driver_version() -> str:
    """Return the version of CUDA that the driver is for."""
    number = int(_ask("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


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
    """Return what is known of a machine."""
    count = runtime.device_count()
    gibibytes = device_bytes(runtime, 0) / 2**30
    return {
        "date": date,
        "GPU": f"{device_name(0)}, {gibibytes:.0f} GiB{f' (the first of {count})' if count > 1 else ''}",
        "driver": _driver_version(),
        "CUDA of the driver": driver_version(),
        "cuda-bindings": _package_version("cuda-bindings"),
        "CuPy": _cupy_version(),
        "PyTorch": _package_version("torch"),
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _cupy_version() -> str:
    """Return the version of whichever of its distributions is installed; they differ by CUDA's version."""
    names = [name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _package_version(name) != _MISSING]
    return ", ".join(f"{name} {_package_version(name)}" for name in names) or _MISSING


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        answer = subprocess.run(_QUERY, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.strip()
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text())
        if found:
            return found[0]
    return "unknown"


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _MISSING
