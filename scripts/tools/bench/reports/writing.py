"""Where the reports of a run go: JSON, a page of documentation, pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..pictures import drawings_of
from .document import document_of
from .files import ReportError, check_file, check_folder, write
from .runs import Run, json_of

__all__ = ["Reports"]


class Reports(NamedTuple):
    """Where to write what; None for what nobody wants.

    Attributes
    ----------
    json, document : Path or None
        Files.
    pictures : Path or None
        A folder.
    """

    json: Path | None = None
    document: Path | None = None
    pictures: Path | None = None

    def check(self) -> None:
        """Raise :class:`ReportError` if one of them could not be written."""
        for file in filter(None, (self.json, self.document)):
            check_file(file)
        if self.pictures:
            check_folder(self.pictures)

    def write(self, run: Run) -> None:
        """Write all of them, also where one fails.

        Raises
        ------
        ReportError
            Some could not be written.
        """
        failures = []
        for file, content in self._contents(run):
            try:
                write(file, content)
            except ReportError as error:
                failures.append(str(error))
        if failures:
            raise ReportError("\n".join(failures))

    def _contents(self, run: Run) -> Iterator[tuple[Path, bytes]]:
        """Yield every file and what is in it: JSON first, of which the others can be made again."""
        if self.json:
            yield self.json, json_of(run).encode()
        drawings = drawings_of(run.curves, run.machine) if self.pictures else []
        for drawing in drawings:
            for name, content in drawing.files.items():
                yield Path(self.pictures or "", name), content
        if self.document:
            folder = os.path.relpath(self.pictures or self.document.parent, self.document.parent)
            links = [(each, Path(folder, f"{each.name}.svg").as_posix()) for each in drawings]
            yield self.document, document_of(run.figures, run.machine, links).encode()
