"""What a run of the bench has found, and that as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from ..figures import Figure


class ReportError(Exception):
    """A report cannot be written; the message says all that a user needs."""


class Curves:
    """All lines of the pictures of a run, in the order in which they were measured first.

    Milliseconds by bytes, or calls per second by threads or tasks.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[str, str, str], dict[int, float]] = {}

    def add(self, picture: str, panel: str, line: str, x: int, y: float) -> None:
        """Keep a point of a group's picture and of a panel of it; both numbers are above 0."""
        self._points.setdefault((picture, panel, line), {})[x] = y

    def of(self, picture: str) -> dict[str, dict[str, dict[int, float]]]:
        panels: dict[str, dict[str, dict[int, float]]] = {}
        for (found, panel, line), points in self._points.items():
            if found == picture:
                panels.setdefault(panel, {})[line] = points
        return panels

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"picture": picture, "panel": panel, "line": line, "points": list(map(list, points.items()))}
            for (picture, panel, line), points in self._points.items()
        ]


def as_json(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "held_to": figure.held_to, "holds": figure.is_held}


class Run(NamedTuple):
    """What a run has found."""

    machine: Mapping[str, str]
    figures: list[Figure]
    medians_ms: Mapping[str, Mapping[str, float]]  # by what was measured, and by case
    curves: Curves


def json_of(run: Run) -> str:
    content = {
        "machine": run.machine,
        "figures": [as_json(figure) for figure in run.figures],
        "medians_ms": run.medians_ms,
        "curves": run.curves.as_json(),
    }
    return json.dumps(content, indent=2) + "\n"
