"""What the check asks of CUDA's driver that the library has no use for."""

from __future__ import annotations

from typing import Any

from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.runtime import CudaRuntime

__all__ = ["device_bytes", "device_name", "driver_version", "used_bytes"]


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


def _ask(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver  # noqa: PLC0415  # where a runtime is, it is too

    error, *found = getattr(driver, name)(*arguments)
    if error:
        raise CudaError(f"asking for {name}", error.name)
    return found[0] if len(found) == 1 else found
