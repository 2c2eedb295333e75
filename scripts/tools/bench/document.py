"""The bench's report as a page of documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..common.figures import Figure
from .figures import COLUMNS, MEASURED_ELSEWHERE, cells_of

__all__ = ["document_of"]

_BEGIN: Final = """\
# Numbers

Written by `scripts/bench --document docs/bench.md`. Every figure is a ratio or a difference of medians of one run, in
which all cases took turns; each is held to the limit beside it. Times differ from machine to machine; ratios hardly do.

"""


def document_of(figures: Sequence[Figure], machine: Mapping[str, str]) -> str:
    """Return the page, in Markdown."""
    lines = [*_rows(("machine", ""), machine.items()), "", *_rows(COLUMNS, map(cells_of, figures))]
    lines += [_row(cells_of(elsewhere)) for elsewhere in MEASURED_ELSEWHERE]
    beyond = [figure.name for figure in figures if figure.is_held is False]
    held = sum(figure.is_held is True for figure in figures)
    summary = f"{held} of {held + len(beyond)} limits are held."
    if beyond:
        summary += f" Not held: {'; '.join(beyond)}."
    return _BEGIN + "\n".join([*lines, "", summary, ""])


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
