"""What processes and shared memory take."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

from shm_backend_utils.memory.sealed import LINK
from shm_backend_utils.memory.shared_file import DEV_SHM

__all__ = ["resident_bytes", "sealed_bytes", "shared_bytes"]

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
