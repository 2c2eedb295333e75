"""What the bench was run on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.memory.sealed import LINK
from shm_backend_utils.memory.shared_file import DEV_SHM


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


_OWN: Final = re.compile(r"Rss(?:Anon|File):\s+(\d+) kB")
_BLOCK: Final = 512
_SEALED: Final = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(LINK)}$", re.MULTILINE)


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has resident, without shared memory: that is nobody's own."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(kibibytes) for kibibytes in _OWN.findall(status))


def sealed_bytes(pid: int) -> int:
    """Return how much sealed memory a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sum(int(end, 16) - int(begin, 16) for begin, end in _SEALED.findall(maps))


def shared_bytes(prefix: str) -> int:
    """Return how much memory the objects of ``/dev/shm`` take whose names begin so."""
    total = 0
    for path in DEV_SHM.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            total += _BLOCK * path.stat().st_blocks
    return total
