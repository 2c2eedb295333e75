"""The results of a run of the bench, and its reports: a table, JSON, a page of documentation and pictures."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from ..figures import Figure
from .pictures import PICTURES, Panels, drawings_of


class Run(NamedTuple):
    machine: Mapping[str, str]
    figures: list[Figure]
    medians_ms: Mapping[str, Mapping[str, float]]  # by what was measured, and by case
    curves: Mapping[str, Panels]  # by picture


def as_json(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "held_to": figure.held_to, "holds": figure.is_held}


_BEGIN: Final = """\
# Numbers

Written, with the pictures, by

    scripts/bench --json bench.json --document docs/bench.md --plot docs/images

Every figure is a ratio or a difference of medians of one run, in which all cases took turns; each is held to the limit
beside it. Rates are compared period by period, and their figure is the median of these quotients. Times differ from
machine to machine; ratios do less, those of rates and of large tensors by a fifth and more.

"""


def document_of(figures: Sequence[Figure], machine: Mapping[str, str], links: Mapping[str, str]) -> str:
    shown = [f"![{PICTURES[name].title}]({link})\n\n{PICTURES[name].caption}\n" for name, link in links.items()]
    lines = [*_rows(("machine", ""), machine.items()), "", *shown, *_rows(COLUMNS, map(cells_of, figures))]
    beyond = [figure.name for figure in figures if figure.is_held is False]
    held = sum(figure.is_held is True for figure in figures)
    summary = f"{held} of {held + len(beyond)} limits are held."
    if beyond:
        summary += f" Not held: {'; '.join(beyond)}."
    return _BEGIN + "\n".join([*lines, "", summary, ""])


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


COLUMNS: Final = ("measure", "figure", "of what", "limit", "holds", "from")


def cells_of(figure: Figure) -> tuple[str, ...]:
    value = f"{figure.figure:,.0f}" if figure.figure == int(figure.figure) else f"{figure.figure:.2f}"
    holds = {True: "yes", False: "no", None: ""}[figure.is_held]
    return figure.name, value, figure.unit, figure.held_to, holds, figure.basis


def table_of(figures: list[Figure]) -> Table:
    table = Table(*COLUMNS)
    styles = {True: "green", False: "bold red", None: None}
    for figure in figures:
        table.add_row(*map(Text, cells_of(figure)), style=styles[figure.is_held])
    return table


class Reports(NamedTuple):
    """The files of the reports to write; None for one that is not wanted."""

    json: Path | None = None
    document: Path | None = None
    pictures: Path | None = None  # a folder

    def check(self) -> None:
        """Make the folder, and the files that are not there; raise OSError if one of them could not be written."""
        for file in filter(None, (self.json, self.document)):
            file.open("ab").close()
        if self.pictures:
            self.pictures.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.pictures).close()

    def write(self, run: Run) -> None:
        if self.json:
            content = {**run._asdict(), "figures": [as_json(figure) for figure in run.figures]}
            self.json.write_text(json.dumps(content, indent=2) + "\n")
        links: dict[str, str] = {}
        if self.pictures:
            for name, drawing in drawings_of(run.curves, run.machine).items():
                file = self.pictures / f"{name}.svg"
                file.write_bytes(drawing)
                links[name] = os.path.relpath(file, self.document and self.document.parent)
        if self.document:
            self.document.write_bytes(document_of(run.figures, run.machine, links).encode())
