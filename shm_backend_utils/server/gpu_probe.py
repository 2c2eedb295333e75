"""Print CUDA's answers in this process's environment, as one line of JSON.

A program of its own, of the standard library alone: it is run by path, in another Python, as the server's stub is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from importlib import metadata
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
_BACKENDS_NAME: Final = "libcuda.so"  # by which Triton's Python backend opens it
_USUAL_FOLDERS: Final = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/cuda/compat",
)
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_NAME_LENGTH: Final = 256


def probe() -> dict[str, Any]:
    """Return the findings, without those that could not be asked for."""
    facts: dict[str, Any] = {
        "has_device_files": Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(),
        "bindings": _bindings_version(),
    }
    with contextlib.suppress(OSError):
        facts["driver"] = next((word for word in _DRIVER_FILE.read_text().split() if word[0].isdigit()), "")
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        elsewhere = [folder for folder in _USUAL_FOLDERS if (Path(folder) / LIBRARY).exists()]
        return {**facts, "library": "", "refused": str(error), "elsewhere": elsewhere}
    facts["library"] = _path_of_library()
    facts["backend_finds_it"] = _can_load(_BACKENDS_NAME)
    facts["error"] = _error_name(cuda, cuda.cuInit(0))
    if not facts["error"]:
        version, count = ctypes.c_int(), ctypes.c_int()
        cuda.cuDriverGetVersion(ctypes.byref(version))
        facts["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        facts["error"] = _error_name(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
        facts["devices"] = [_device_name(cuda, number) for number in range(count.value)]
    return facts


def _device_name(cuda: ctypes.CDLL, number: int) -> str:
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    device = ctypes.c_int(number)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, _NAME_LENGTH, device)
    return name.value.decode(errors="replace") or f"GPU {number}"


def _error_name(cuda: ctypes.CDLL, result: int) -> str:
    if result == 0:
        return ""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(result, ctypes.byref(name))
    return (name.value or f"error {result}".encode()).decode()


def _path_of_library() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libcuda.so" in line:
                return line[line.index("/") :]
    return LIBRARY


def _can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _bindings_version() -> str:
    try:
        from cuda.bindings import driver  # noqa: PLC0415, F401  # the import itself is the check
    except ImportError:
        return ""
    return metadata.version("cuda-bindings")


if __name__ == "__main__":
    print(json.dumps(probe()))
