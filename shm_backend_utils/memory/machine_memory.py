"""How much memory this process may have at all: the machine's, or its container's (cgroups(7)).

Sealed memory counts to the container that touches it first. A process that takes too much is killed; no call fails.
So it is looked at before.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["MORE_MEMORY", "available_bytes", "memory_bytes"]

MORE_MEMORY: Final = "give the container more memory (docker: --memory; Kubernetes: resources.limits.memory)"
"""What to do where there is too little."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_UNIFIED: Final = "0::"


def memory_bytes() -> int:
    """Return how much memory the machine has, or its container may have, if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([machine, *(limit for limit, _ in _limits())]))


def available_bytes() -> float:
    """Return how much more memory this process may take, as far as the system tells; infinitely much if it does not."""
    return min([_available_on_machine(), *(limit - used for limit, used in _limits())])


def _available_on_machine() -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return math.inf


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that this process is in, and what is used of it and cannot be taken back."""
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError):  # the root has no limit; other systems have other files
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            yield limit, used - _reclaimable(folder)


def _folders() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUP.read_text().splitlines():
            if line.startswith(_UNIFIED):
                folder = f"{_CGROUPS}{line.removeprefix(_UNIFIED).rstrip('/')}"
                while len(folder) >= len(str(_CGROUPS)):
                    yield Path(folder)
                    folder = folder.rpartition("/")[0]


def _reclaimable(folder: Path) -> int:
    """Return what the kernel gives up before it kills anybody: pages of files that nobody has used lately."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
