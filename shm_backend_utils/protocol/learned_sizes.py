"""How large a model's outputs get: learned from calls where one found too little room, and forgotten again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["LearnedSizes"]

_CALLS: Final = 256
"""So many calls that need less, one after another, show that what was learned is more than is needed."""


class LearnedSizes:
    """Bytes per row that outputs of one model need.

    Parameters
    ----------
    head_room : float
        How many times as much is given as was needed.

    Attributes
    ----------
    per_row : dict of str to int
        With the head room; for each output one number at most.
    """

    def __init__(self, head_room: float) -> None:
        self.per_row: dict[str, int] = {}
        self._head_room = head_room
        self._calls = 0
        self._most = 0.0
        self._has_shrunk = False

    def learn(self, byte_sizes: Mapping[str, int], rows: int) -> None:
        """Take note of outputs that found too little room, in a call of so many rows."""
        for name, byte_size in byte_sizes.items():
            self.per_row[name] = max(math.ceil(byte_size / rows * self._head_room), self.per_row.get(name, 0))
        self._most = max(self._most, sum(byte_sizes.values()) / rows)

    def shrink(self, byte_size: int, rows: int) -> bool:
        """Take note of a call whose outputs had at most so many bytes together.

        Returns
        -------
        bool
            Whether calls have had less for a while: memory that none of them has is not needed then.
        """
        self._most = max(self._most, byte_size / rows)
        self._calls += 1
        if self._calls < _CALLS:
            return False
        most = math.ceil(self._most * self._head_room)
        self._calls, self._most = 0, 0.0
        too_large = [name for name, size in self.per_row.items() if size > most]
        self.per_row.update(dict.fromkeys(too_large, most))
        had_shrunk, self._has_shrunk = self._has_shrunk, bool(too_large)
        return had_shrunk
