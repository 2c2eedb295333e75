"""The picture of throughput: calls per second over the number of callers, a column for each size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from .drawing import Panels, begin, label_of_bytes, legend_below, line_of

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE: Final = "Calls per second of one process, over gRPC"
CAPTION: Final = (
    "Client, server and model share the machine's cores. All callers of a process use one client; every tensor has "
    "another length than the one before."
)

_PANEL: Final = re.compile(r"(\w+), (\d+) bytes")
_COLUMNS: Final = 3


def draw(panels: Panels, machine: Mapping[str, str]) -> Figure:
    """Draw calls per second over threads and tasks."""
    kinds = {panel: _kind(panel) for panel in panels}
    rows = list(dict.fromkeys(who for who, _ in kinds.values()))
    columns = list(dict.fromkeys(size for _, size in kinds.values()))
    lines = {name for panel in panels.values() for name in panel}
    figure = begin(TITLE, machine, 2.35 * len(rows), -(-len(lines) // _COLUMNS))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for panel, (who, size) in kinds.items():
        axes = grid[rows.index(who)][columns.index(size)]
        for name, points in panels[panel].items():
            axes.plot(*zip(*sorted(points.items()), strict=True), **line_of(name).options)
        callers = sorted({x for points in panels[panel].values() for x in points})
        axes.set_title(f"{who}, tensors around {size}" if size else who)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.08 * max(y for points in panels[panel].values() for y in points.values()))
        axes.xaxis.set_major_locator(FixedLocator(callers))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        axes.set_xlabel(who)
        axes.grid(visible=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("calls per second")
    legend_below(figure, grid.flat, _COLUMNS)
    return figure


def _kind(panel: str) -> tuple[str, str]:
    """Return who calls, and with how much."""
    found = _PANEL.fullmatch(panel)
    return (found[1], label_of_bytes(int(found[2]))) if found else (panel, "")
