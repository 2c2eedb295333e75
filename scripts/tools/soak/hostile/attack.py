"""What every attack is."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

from .forged import Forged, Wire

__all__ = ["Attack"]


class Attack(ABC):
    """One attacker. What it needs is made before anything is measured.

    Parameters
    ----------
    wire : Wire
    seed : int
    """

    def __init__(self, wire: Wire, seed: int) -> None:
        self.wire = wire
        self.chance = random.Random(seed)
        self.forged: list[Forged] = []
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make what is needed."""

    @abstractmethod
    def strike(self) -> None:
        """Do one unit of work."""

    def pause(self) -> None:
        """Let go of what is held, as another attacker's turn begins. Most hold nothing."""
        return

    def close(self) -> None:
        """Remove what was made."""
        while self.forged:
            self.forged.pop().remove()
