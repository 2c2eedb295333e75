"""How much the bench does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["FULL", "QUICK", "Amounts"]


@dataclass(frozen=True)
class Amounts:
    """How often everything is measured.

    Attributes
    ----------
    rounds : int
        How often each case runs.
    slow_rounds : int
        How often those run that take tens of milliseconds, or more.
    period_s : float
        For how long calls are counted at a time.
    periods : int
        How many such periods there are of each case.
    requests : int
        How many requests at random are sent to see what grows.
    """

    rounds: int = 300
    slow_rounds: int = 30
    period_s: float = 1.5
    periods: int = 5
    requests: int = 100_000

    def with_rounds(self, rounds: int) -> Amounts:
        """Return these amounts, with so many rounds."""
        return replace(self, rounds=rounds, slow_rounds=max(rounds // 10, 1))

    def with_requests(self, requests: int) -> Amounts:
        """Return these amounts, with so many requests at random."""
        return replace(self, requests=requests)


FULL: Final = Amounts()
QUICK: Final = Amounts(rounds=30, slow_rounds=3, period_s=0.1, periods=2, requests=2_000)
"""To see whether everything works."""
