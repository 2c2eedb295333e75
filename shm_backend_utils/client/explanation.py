"""Why a model's calls take the path that they take."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Check", "Explanation", "TextTable"]


class TextTable(NamedTuple):
    """Rows under a title."""

    title: str
    rows: Sequence[Sequence[str]]  # as many cells in each, with any characters

    def __str__(self) -> str:
        """Return a line for each row; all columns but the last one are as wide as they need to be."""
        rows = [[_in_a_line(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = [
            "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        ]
        return "\n  ".join([_in_a_line(self.title), *lines])

    def html(self) -> str:
        """Return it for a notebook."""
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{html.escape(self.title)}</caption><tbody>{body}</tbody></table>"


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Check:
    """One condition.

    Attributes
    ----------
    name : str
        What was asked.
    outcome : bool or None
        None if only a request can tell.
    detail : str
        What was found, and what to do where that is not as it should be.
    needed_by : tuple of str
        The paths that are closed if the outcome is False.
    is_passing : bool
        Whether the outcome may be another one at any time.
    """

    name: str
    outcome: bool | None
    detail: str
    needed_by: tuple[str, ...]
    is_passing: bool = False

    @property
    def row(self) -> tuple[str, str, str]:
        """The check in words."""
        return self.name, {True: "yes", False: "no", None: "unknown"}[self.outcome], self.detail

    def __str__(self) -> str:
        return "  ".join(self.row)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why calls of a model take the path that they take. Its text is a table for people.

    Attributes
    ----------
    model : str
    path : str or None
        Which path ``path="auto"`` takes; None if all are closed.
    reason : str
        Why not a better one.
    checks : tuple of Check
    """

    model: str
    path: str | None
    reason: str
    checks: tuple[Check, ...]

    def open(self, path: str) -> bool:
        """Return whether nothing is known to stand against a path.

        Parameters
        ----------
        path : str
            ``"direct"``, ``"triton-shm"`` or ``"inline"``.

        Returns
        -------
        bool
            True also where something could not be checked.
        """
        return not self.obstacles(path)

    def obstacles(self, path: str) -> list[Check]:
        """Return the checks that close a path.

        Parameters
        ----------
        path : str
            As of :meth:`open`.

        Returns
        -------
        list of Check
            Those that were made and failed; empty if the path is open.
        """
        return [check for check in self.checks if check.outcome is False and path in check.needed_by]

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        title = f"model {self.model!r} takes the path {self.path}: {self.reason}"
        return TextTable(title, [check.row for check in self.checks])
