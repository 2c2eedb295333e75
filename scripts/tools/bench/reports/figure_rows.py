"""How the bench writes its figures: as a table for people, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from shm_backend_utils.cli.wording import printable

from ...figures import Figure

__all__ = ["COLUMNS", "MEASURED_ELSEWHERE", "Elsewhere", "as_json", "cells_of", "from_json", "table_of"]

_NONSENSE: Final = 2.0**63

COLUMNS: Final = ("measure", "figure", "of what", "limit", "holds", "from")


class Elsewhere(NamedTuple):
    """A figure that another tool measures."""

    name: str
    limit: str
    tool: str


MEASURED_ELSEWHERE: Final = (
    Elsewhere("10^6 requests with faults", "0 wrong bytes, 0 leaked descriptors, mappings or segments", "scripts/soak"),
)
"""Rows that every report names, so that it names all that the library is held to."""


def as_json(figure: Figure) -> dict[str, Any]:
    """Return a figure in JSON's types."""
    return {
        "name": figure.name,
        "figure": figure.figure,
        "unit": figure.unit,
        "held_to": figure.held_to,
        "holds": figure.is_held,
        "basis": figure.basis,
        "at_most": figure.at_most,
        "at_least": figure.at_least,
    }


def from_json(given: Any) -> Figure:
    """Return what :func:`as_json` has written.

    Raises
    ------
    ValueError
        It was something else.
    """
    if not (
        isinstance(given, Mapping)
        and all(isinstance(given.get(name), str) for name in ("name", "unit", "basis"))
        and _is_number(given.get("figure"))
        and all(given.get(name) is None or _is_number(given[name]) for name in ("at_most", "at_least"))
    ):
        raise ValueError(f"one of 'figures' is none: {str(given)[:60]}")
    limits = given.get("at_most"), given.get("at_least")
    return Figure(given["name"], given["figure"], given["unit"], given["basis"], *limits)


def _is_number(given: Any) -> bool:
    """Return whether it is one that a bench may have measured: JSON may have more than a float can hold, and NaN."""
    return isinstance(given, int | float) and abs(given) < _NONSENSE


def cells_of(figure: Figure | Elsewhere) -> tuple[str, ...]:
    """Return the row of a figure, one text for each of :data:`COLUMNS`."""
    if isinstance(figure, Elsewhere):
        return figure.name, "", "", figure.limit, "", f"measured by {figure.tool}"
    value = f"{figure.figure:,.0f}" if figure.figure == int(figure.figure) else f"{figure.figure:.2f}"
    holds = {True: "yes", False: "no", None: ""}[figure.is_held]
    return figure.name, value, figure.unit, figure.held_to, holds, figure.basis


def table_of(figures: list[Figure]) -> Table:
    """Return the figures as a table for people."""
    table = Table(*COLUMNS)
    styles = {True: "green", False: "bold red", None: None}
    for figure in figures:
        table.add_row(*_shown(figure), style=styles[figure.is_held])
    for elsewhere in MEASURED_ELSEWHERE:
        table.add_row(*_shown(elsewhere))
    return table


def _shown(figure: Figure | Elsewhere) -> list[Text]:
    """Return the cells as a terminal may show them: brackets are no markup, and names may be anybody's."""
    return [Text(printable(cell)) for cell in cells_of(figure)]
