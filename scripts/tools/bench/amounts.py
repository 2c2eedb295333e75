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
    largest_bytes : int
        How large a tensor is in the pictures at most.
    """

    rounds: int = 300
    slow_rounds: int = 30
    period_s: float = 1.5
    periods: int = 5
    requests: int = 100_000
    largest_bytes: int = 2**30

    @property
    def label(self) -> dict[str, str]:
        """What a run is marked with, beside the machine, whose figures are not to be quoted; empty for a whole one."""
        is_whole = self.largest_bytes == Amounts.largest_bytes
        return {} if is_whole else {"run": "--quick"}

    def with_rounds(self, rounds: int) -> Amounts:
        """Return these amounts, with so many rounds."""
        return replace(self, rounds=rounds, slow_rounds=max(rounds // 10, 1))

    def with_periods(self, period_s: float, periods: int) -> Amounts:
        """Return these amounts, counting calls for so long, and so often, at most."""
        return replace(self, period_s=min(period_s, self.period_s), periods=min(periods, self.periods))

    def with_requests(self, requests: int) -> Amounts:
        """Return these amounts, with so many requests at random."""
        return replace(self, requests=requests)


FULL: Final = Amounts()
QUICK: Final = Amounts(rounds=30, slow_rounds=3, period_s=0.1, periods=2, requests=2_000, largest_bytes=2**20)
"""To see whether everything works."""
