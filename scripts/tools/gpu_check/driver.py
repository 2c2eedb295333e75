"""What the check asks of CUDA's driver that the library has no use for."""

from __future__ import annotations

from typing import Any

import numpy as np

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import CudaRuntime

__all__ = ["device_bytes", "device_name", "driver_version", "pool_memory", "used_bytes"]


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
