"""What the bench reports: figures, most of them next to what they are held to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rich.table import Table

__all__ = ["AtLeast", "AtMost", "Figure", "ForInformation", "table_of"]


@dataclass(frozen=True)
class Figure(ABC):
    """One figure.

    Attributes
    ----------
    name : str
    value : float
    unit : str
    basis : str
        What it was worked out from.
    """

    name: str
    value: float
    unit: str
    basis: str

    @property
    @abstractmethod
    def held_to(self) -> str:
        """What it must be, in words."""

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Whether it is what it must be."""

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return {
            "name": self.name,
            "figure": self.value,
            "unit": self.unit,
            "held_to": self.held_to,
            "holds": self.holds,
            "basis": self.basis,
        }


@dataclass(frozen=True)
class AtMost(Figure):
    """A figure that is better the lower it is."""

    limit: float

    @property
    def held_to(self) -> str:
        return f"at most {self.limit:g}"

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class AtLeast(Figure):
    """A figure that is better the higher it is."""

    limit: float

    @property
    def held_to(self) -> str:
        return f"at least {self.limit:g}"

    @property
    def holds(self) -> bool:
        return self.value >= self.limit


@dataclass(frozen=True)
class ForInformation(Figure):
    """A figure that is held to nothing."""

    @property
    def held_to(self) -> str:
        return ""

    @property
    def holds(self) -> bool:
        return True


def table_of(figures: list[Figure]) -> Table:
    """Return the figures as a table for people."""
    table = Table("figure", "measured", "held to", "unit", "from")
    for figure in figures:
        style = ("green" if figure.holds else "red") if figure.held_to else "default"
        table.add_row(figure.name, f"[{style}]{figure.value:.2f}[/]", figure.held_to, figure.unit, figure.basis)
    return table
