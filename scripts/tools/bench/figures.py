"""How the bench writes its figures: as a table for people, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..common.figures import Figure

__all__ = ["as_json", "table_of"]


def as_json(figure: Figure) -> dict[str, Any]:
    """Return a figure in JSON's types."""
    return {
        "name": figure.name,
        "figure": figure.figure,
        "unit": figure.unit,
        "held_to": figure.held_to,
        "holds": figure.is_held is not False,
        "basis": figure.basis,
    }


def table_of(figures: list[Figure]) -> Table:
    """Return the figures as a table for people."""
    table = Table("figure", "measured", "held to", "unit", "from")
    styles = {True: "green", False: "red", None: "default"}
    for figure in figures:
        style = styles[figure.is_held]
        table.add_row(figure.name, f"[{style}]{figure.figure:.2f}[/]", figure.held_to, figure.unit, figure.basis)
    return table
