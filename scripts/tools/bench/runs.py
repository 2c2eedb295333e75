"""What a run of the bench has found, as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shm_backend_utils.repository.source_files import read_source

from ..figures import Figure


class ReportError(Exception):
    """A report cannot be written, or an earlier one not be read; the message says all that a user needs."""


class Curve(NamedTuple):
    """One line of a picture: milliseconds by bytes, or calls per second by threads or tasks."""

    picture: str  # the group that measured it
    panel: str  # the part of the picture, such as "grpc"
    line: str
    points: dict[int, float]


class Curves:
    """All lines of a run, in the order in which they were measured first."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str, str], Curve] = {}

    def add(self, picture: str, panel: str, line: str, x: int, y: float) -> None:
        """Keep a point; both numbers are above 0."""
        key = picture, panel, line
        self._curves.setdefault(key, Curve(*key, {})).points[x] = y

    def of(self, picture: str) -> dict[str, dict[str, dict[int, float]]]:
        """Return a picture's points, by panel and line."""
        panels: dict[str, dict[str, dict[int, float]]] = {}
        for curve in self:
            if curve.picture == picture:
                panels.setdefault(curve.panel, {})[curve.line] = curve.points
        return panels

    def __iter__(self) -> Iterator[Curve]:
        return iter(self._curves.values())

    def as_json(self) -> list[dict[str, Any]]:
        """Return them in JSON's types."""
        return [{**curve._asdict(), "points": list(map(list, curve.points.items()))} for curve in self]

    @classmethod
    def from_json(cls, given: Any) -> Curves:
        """Return what :meth:`as_json` has written."""
        curves = cls()
        for each in given:
            for x, y in each["points"]:
                curves.add(each["picture"], each["panel"], each["line"], x, y)
        return curves


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
    """Return what :func:`as_json` has written."""
    return Figure(*[given[name] for name in ("name", "figure", "unit", "basis", "at_most", "at_least")])


class Run(NamedTuple):
    """What a run has found."""

    machine: Mapping[str, str]
    figures: list[Figure]
    medians_ms: Mapping[str, Mapping[str, float]]  # by what was measured, and by case
    curves: Curves


def json_of(run: Run) -> str:
    """Return a run as JSON."""
    content = {
        "machine": run.machine,
        "figures": [as_json(figure) for figure in run.figures],
        "medians_ms": run.medians_ms,
        "curves": run.curves.as_json(),
    }
    return json.dumps(content, indent=2) + "\n"


def read_run(file: Path) -> Run:
    """Read what ``--json`` has written; raise ReportError where that cannot be read, or is something else."""
    try:
        content = json.loads(read_source(file))
        figures = [from_json(figure) for figure in content["figures"]]
        return Run(content["machine"], figures, content["medians_ms"], Curves.from_json(content["curves"]))
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:  # of UTF-8, of JSON, of what it says
        raise ReportError(f"{file} is not what bench --json has written: {error!r}") from None
