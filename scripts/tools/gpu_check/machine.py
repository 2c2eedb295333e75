"""What the GPU check is run on: names and versions, for the report."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from shm_backend_utils.gpu.runtime import CudaRuntime

from .driver import device_bytes, device_name, driver_version

__all__ = ["describe"]

_MISSING: Final = "not installed"
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


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
