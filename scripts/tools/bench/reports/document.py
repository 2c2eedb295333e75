"""The bench's report as a page of documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...figures import Figure
from ..pictures import Drawing
from .figure_rows import COLUMNS, MEASURED_ELSEWHERE, cells_of

__all__ = ["document_of"]

_BEGIN: Final = """\
# Numbers

Written, with the pictures, by

    scripts/bench --json bench.json --document docs/bench.md --plot docs/images

Every figure is a ratio or a difference of medians of one run, in which all cases took turns; each is held to the limit
beside it. Rates are compared period by period, and their figure is the median of these quotients. Times differ from
machine to machine; ratios do less, those of rates and of large tensors by a fifth and more.

"""


def document_of(
    figures: Sequence[Figure], machine: Mapping[str, str], pictures: Sequence[tuple[Drawing, str]] = ()
) -> str:
    """Return the page, in Markdown; pictures come with the links to them."""
    shown = [f"![{drawing.title}]({link})\n\n{drawing.caption}\n" for drawing, link in pictures]
    lines = [*_rows(("machine", ""), machine.items()), "", *shown, *_rows(COLUMNS, map(cells_of, figures))]
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
