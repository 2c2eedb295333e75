"""The soak asks the machine for full memory, and looks at who holds /dev/shm and how much processes grow."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

from shm_backend_utils.memory.sealed import LINK
from shm_backend_utils.memory.shared_file import DEV_SHM, free_bytes

from ..processes import mappings, open_files, read_if_there

WARM_S: Final = 20.0
MOST_GROWTH: Final = 64 << 20
"""More than allocators keep for later."""
_RESIDENT: Final = re.compile(r"RssAnon:\s+(\d+) kB")


def fill(name: str) -> Path:
    """Take all space of /dev/shm with one file."""
    path = DEV_SHM / name
    with path.open("xb") as file:
        while free := int(free_bytes()):
            with contextlib.suppress(OSError):  # somebody was faster: what is left is less now
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
    return path


def held_shared_memory(pid: int | str, marker: str = "") -> list[str]:
    """Return what a process holds of /dev/shm, descriptors and mappings, where the name contains ``marker``."""
    return [f"{kind} of {target}" for kind, target in _held(pid) if target.startswith(f"{DEV_SHM}/{marker}")]


def held_sealed_memory(pid: int | str) -> list[str]:
    """Return what a process holds of sealed memory of this package's, descriptors and mappings."""
    return [f"{kind} of sealed memory" for kind, target in _held(pid) if target == LINK]


def _held(pid: int | str) -> list[tuple[str, str]]:
    held = [("descriptor", target) for target in open_files(pid)]
    return held + [("mapping", line.split(maxsplit=5)[-1]) for line in mappings(pid)]


class Growth:
    """Looks at processes from time to time, and keeps by how much each has grown since it was warm."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}  # the largest growth of a process of each kind, in bytes
        self._seen: dict[int, float] = {}
        self._warm: dict[int, int] = {}

    def look(self, kind: str, pid: int) -> None:
        """Look at a process."""
        now = time.monotonic()
        if now - self._seen.setdefault(pid, now) < WARM_S:
            return
        found = _RESIDENT.search(read_if_there(Path(f"/proc/{pid}/status")))
        if found is None:
            return
        resident = int(found[1]) << 10
        self.most[kind] = max(self.most.get(kind, 0), resident - self._warm.setdefault(pid, resident))

    def leaks(self) -> dict[str, int]:
        """Return the kinds of process that have grown without a bound."""
        return {kind: growth for kind, growth in self.most.items() if growth > MOST_GROWTH}
