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

from .gpu import Gpu

__all__ = ["describe", "gpu_name"]

_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def describe(gpu: Gpu, date: str) -> dict[str, str]:
    """Return what is known of a machine."""
    runtime = gpu.cupy.cuda.runtime
    count = gpu.runtime.device_count()
    gibibytes = runtime.getDeviceProperties(0)["totalGlobalMem"] / 2**30
    return {
        "date": date,
        "GPU": f"{gpu_name(gpu)}, {gibibytes:.0f} GiB{f' (the first of {count})' if count > 1 else ''}",
        "driver": _driver_version(),
        "CUDA of the driver": _cuda_version(runtime.driverGetVersion()),
        "CUDA of CuPy": _cuda_version(runtime.runtimeGetVersion()),
        "CuPy": gpu.cupy.__version__,
        "PyTorch": _package_version("torch"),
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def gpu_name(gpu: Gpu) -> str:
    """Return the name that CUDA has for it."""
    name: bytes = gpu.cupy.cuda.runtime.getDeviceProperties(0)["name"]
    return name.decode()


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


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
