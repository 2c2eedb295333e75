"""Tables for people: aligned at a prompt, and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TextTable"]


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
