"""What a run of the bench has found, and that as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..figures import Figure


class ReportError(Exception):
    """A report cannot be written; the message says all that a user needs."""


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
