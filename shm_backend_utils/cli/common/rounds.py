"""How every tool measures: all cases once per round, each round in another order."""

from __future__ import annotations

import random
from collections.abc import Iterable

__all__ = ["shuffled"]


def shuffled(names: Iterable[str], round_number: int) -> list[str]:
    """Return the names in the round's order, with other neighbours each time, as a case warms caches for the next."""
    order = list(names)
    random.Random(round_number).shuffle(order)
    return order
