"""How large a model's outputs get: learned from calls where one found too little room, and forgotten again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["CALLS", "LearnedSizes"]

CALLS: Final = 256
"""So many calls that need less, one after another, show that what was learned is more than is needed."""


class LearnedSizes:
    """Bytes per row that outputs of one model need, times the head room."""

    def __init__(self, head_room: float) -> None:
        self.per_row: dict[str, int] = {}  # with the head room
        # What calls since shrink() had in all outputs together, per row. Calls add theirs where per_row is not empty;
        # after CALLS of them, it is time to shrink.
        self.needed: list[float] = []
        self._head_room = head_room
        self._has_shrunk = False

    def learn(self, byte_sizes: Mapping[str, int], rows: int) -> None:
        """Take note of outputs that found too little room, in a call of so many rows."""
        for name, byte_size in byte_sizes.items():
            self.per_row[name] = max(math.ceil(byte_size / rows * self._head_room), self.per_row.get(name, 0))
        self.needed.append(sum(byte_sizes.values()) / rows)
        del self.needed[:-CALLS]  # of streams, which do not shrink them

    def shrink(self) -> bool:
        """Forget unneeded room after enough calls: none of its outputs is larger than all of them together.

        Return whether calls have had less for a while: memory that none of them has is not needed then.
        """
        needed = self.needed
        if len(needed) < CALLS:
            return False
        self.needed = []
        most = math.ceil(max(needed) * self._head_room)
        too_large = [name for name, size in list(self.per_row.items()) if size > most]
        self.per_row.update(dict.fromkeys(too_large, most))
        had_shrunk, self._has_shrunk = self._has_shrunk, bool(too_large)
        return had_shrunk
