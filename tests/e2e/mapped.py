"""Where an array lies, as the kernel has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

__all__ = ["lies_in_shared_memory"]


def lies_in_shared_memory(array: npt.NDArray[Any]) -> bool:
    """Return whether a file of /dev/shm, or sealed memory, is at the addresses of the array."""
    begin = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= begin and begin + array.nbytes <= high:
            return name.startswith(("/dev/shm/", "/memfd:shmbu "))
    return False
