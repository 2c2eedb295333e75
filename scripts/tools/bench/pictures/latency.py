"""The picture of latency: log-log, one panel for each protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .drawing import Panels, begin, label_of_bytes, legend_below, line_of

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE: Final = "Round trip of one tensor, there and back"
CAPTION: Final = (
    "Medians, one request at a time. *In place*: the tensor is in shared memory already, and nothing is copied; all "
    "others copy it once on its way in, at least. In band nothing beyond 64 MiB is measured, as a call takes half a "
    "second and more there; `triton-shm-client` knows gRPC alone. Above 16 MiB the ways are measured one after "
    "another, in few rounds: small differences there mean nothing."
)

_PANELS: Final = {"grpc": "gRPC", "http": "HTTP"}
_TICKS: Final = tuple(2**exponent for exponent in (6, 12, 18, 24, 30))
_STEPS: Final = (1, 2, 5)
_COLUMNS: Final = 2  # this library, and the others


def draw(panels: Panels, machine: Mapping[str, str]) -> Figure:
    """Draw milliseconds over bytes."""
    lines = {name for panel in panels.values() for name in panel}
    figure = begin(TITLE, machine, 4.0, -(-len(lines) // _COLUMNS))
    milliseconds = [y for panel in panels.values() for points in panel.values() for y in points.values()]
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (panel, curves) in zip(all_axes, panels.items(), strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), **line_of(name).options)
        axes.set_title(_PANELS.get(panel, panel))
        axes.set(xscale="log", yscale="log", xlabel="size of the tensor")
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: label_of_bytes(x)))
        axes.yaxis.set_major_locator(LogLocator(10, _STEPS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g} ms"))
        axes.grid(visible=True)
    all_axes[0].set_ylim(_limits(milliseconds))
    legend_below(figure, all_axes, _COLUMNS)
    return figure


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return from where to where the axis goes: between two of its labels, however short a run is."""
    lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    labels = [step * 10.0**exponent for exponent in range(lowest - 1, highest + 1) for step in _STEPS]
    return max(y for y in labels if y < min(values)), min(y for y in labels if y > max(values))
