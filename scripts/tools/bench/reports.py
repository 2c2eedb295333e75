"""The results of a run of the bench, and its reports: a table, JSON, a page of documentation and pictures."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from ..figures import Figure
from .pictures import Drawing, Panels, drawings_of


class ReportError(Exception):
    """A report cannot be written; the message says all that a user needs."""


class Run(NamedTuple):
    machine: Mapping[str, str]
    figures: list[Figure]
    medians_ms: Mapping[str, Mapping[str, float]]  # by what was measured, and by case
    curves: Mapping[str, Panels]  # by picture


def as_json(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "held_to": figure.held_to, "holds": figure.is_held}


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from None


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
    shown = [f"![{drawing.title}]({link})\n\n{drawing.caption}\n" for drawing, link in pictures]
    lines = [*_rows(("machine", ""), machine.items()), "", *shown, *_rows(COLUMNS, map(cells_of, figures))]
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
        """Make the folder, and raise :class:`ReportError` if one of them could not be written."""
        for file in filter(None, (self.json, self.document)):
            with _reported(file):
                if file.is_dir():
                    raise IsADirectoryError(0, "it is a folder; expected a file")
                if not file.exists():
                    tempfile.TemporaryFile(dir=file.parent).close()
        if self.pictures:
            with _reported(self.pictures):
                self.pictures.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.pictures).close()

    def write(self, run: Run) -> None:
        for file, content in self._contents(run):
            with _reported(file):
                file.write_bytes(content)

    def _contents(self, run: Run) -> Iterator[tuple[Path, bytes]]:
        if self.json:
            content = {**run._asdict(), "figures": [as_json(figure) for figure in run.figures]}
            yield self.json, (json.dumps(content, indent=2) + "\n").encode()
        drawings = drawings_of(run.curves, run.machine) if self.pictures else []
        for drawing in drawings:
            yield Path(self.pictures or "", drawing.file), drawing.content
        if self.document:
            folder = os.path.relpath(self.pictures or self.document.parent, self.document.parent)
            links = [(each, Path(folder, each.file).as_posix()) for each in drawings]
            yield self.document, document_of(run.figures, run.machine, links).encode()
