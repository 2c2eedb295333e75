"""What the bench was run on."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["describe"]


def describe(plain: Any) -> dict[str, str]:
    """Return what is known of the machine and what runs on it; ``plain`` is tritonclient's client of the server."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "Triton": plain.get_server_metadata().version,
        "tritonclient": version("tritonclient"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
