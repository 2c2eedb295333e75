"""How much the memory that a process has for itself grows after it has warmed up."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

from ..processes import read_if_there

__all__ = ["MOST_GROWTH", "Growth"]

WARM_S: Final = 20.0
MOST_GROWTH: Final = 64 << 20
"""More than allocators keep for later."""
_RESIDENT: Final = re.compile(r"RssAnon:\s+(\d+) kB")


class Growth:
    """Looks at processes from time to time, and keeps by how much each has grown since it was warm.

    Attributes
    ----------
    most : dict of str to int
        The largest growth of a process of each kind, in bytes.
    """

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
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
