"""How every tool measures: all cases once per round, each round in another order, and medians over the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable

__all__ = ["Times", "shuffled"]


def shuffled(names: Iterable[str], round_number: int) -> list[str]:
    """Return the names in the round's order, with other neighbours each time, as a case warms caches for the next."""
    order = list(names)
    random.Random(round_number).shuffle(order)
    return order


class Times:
    """The time of each case in every round."""

    def __init__(self, names: Iterable[str]) -> None:
        self._milliseconds: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, round_number: int, begin: float) -> None:
        """Keep the time since ``begin``, by ``time.perf_counter``; a round below 0 only warms up."""
        if round_number >= 0:
            self._milliseconds[name].append((time.perf_counter() - begin) * 1e3)

    def medians(self) -> dict[str, float]:
        """Return the median of each case, in milliseconds."""
        return {name: statistics.median(values) for name, values in self._milliseconds.items()}
