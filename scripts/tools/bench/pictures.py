"""The bench's pictures, by the names of the groups that measure them: how each is drawn, and what is said of it.

The colours are those of Okabe and Ito, which people who see fewer colours can tell apart as well.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..figures import in_words

INK: Final = "#1f2933"
FAINT: Final = "#52606d"

RC: Final[Mapping[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9.5,
    "grid.color": "#d9dee3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "shm_backend_utils",  # the same names of clip paths every time
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9.0,
    "ytick.color": INK,
    "ytick.labelsize": 9.0,
}

_STEPS: Final = (1, 2, 5)


def _line(label: str, color: str, marker: str, dashes: str = "-") -> dict[str, Any]:
    return {"label": label, "color": color, "marker": marker, "linestyle": dashes}


LINES: Final[Mapping[str, dict[str, Any]]] = {
    "in place": _line("ShmClient.prepare, in place", "#009E73", "o"),
    "ours": _line("ShmClient.infer", "#0072B2", "s"),
    "stock": _line("tritonclient, in band", "#D55E00", "X", "--"),
    "stock triton shm": _line("tritonclient, Triton's shared memory", "#CC79A7", "v", "--"),
    "empty": _line("an empty request", "#000000", "", ":"),
}
"""By the names that the curves have."""


Panels = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Points, by panel and line."""

_TITLE_INCHES: Final = 0.62


def _begin(title: str, machine: Mapping[str, str], panels: Panels, panels_inches: float, columns: int) -> Figure:
    """Return a figure with its title and a line about the machine, with room for panels and, below, for a legend."""
    lines = {name for panel in panels.values() for name in panel}
    legend_inches = 0.22 * -(-len(lines) // columns) + 0.1
    height = _TITLE_INCHES + panels_inches + legend_inches
    bottom, top = legend_inches / height, 1 - _TITLE_INCHES / height
    layout = ConstrainedLayoutEngine(rect=(0.008, bottom, 0.984, top - bottom), wspace=0.04)
    figure = Figure((8.0, height), layout=layout)
    figure.text(0.015, 1 - 0.07 / height, title, fontsize=12.5, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.34 / height, _about(machine), fontsize=9, color=FAINT, va="top")
    return figure


def _about(machine: Mapping[str, str]) -> str:
    cores = machine["cores"]
    words = [
        f"{machine['processor']}, {cores} core{'s' if cores != '1' else ''}",
        *(f"{name} {machine[name]}" for name in ("Triton", "Python", "NumPy")),
        machine["date"],
        machine.get("run", ""),
    ]
    return "  ·  ".join(word for word in words if word)


def _plot(axes: Axes, curves: Mapping[str, Mapping[int, float]]) -> None:
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), **LINES[name])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True)


def _end(figure: Figure, axes: Iterable[Axes], columns: int) -> Figure:
    """Name every line of all panels once, below them; return the figure."""
    named: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    legend = figure.legend(
        named.values(), named, loc="lower center", ncols=columns, handlelength=3.2, columnspacing=1.6
    )
    legend.set_in_layout(False)  # it has its place already
    return figure


def _draw_latency(title: str, panels: Panels, machine: Mapping[str, str]) -> Figure:
    figure = _begin(title, machine, panels, 4.0, 2)
    milliseconds = [y for panel in panels.values() for points in panel.values() for y in points.values()]
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (panel, curves) in zip(all_axes, panels.items(), strict=True):
        axes.set(title={"grpc": "gRPC", "http": "HTTP"}[panel], xscale="log", yscale="log", xlabel="size of the tensor")
        _plot(axes, curves)
        axes.xaxis.set_major_locator(FixedLocator([64, 2**12, 2**18, 2**24, 2**30]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: in_words(x)))
        axes.yaxis.set_major_locator(LogLocator(10, _STEPS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g} ms"))
    all_axes[0].set_ylim(_limits(milliseconds))
    return _end(figure, all_axes, 2)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return from where to where the axis goes: between two of its labels, however short a run is."""
    lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    labels = [step * 10.0**exponent for exponent in range(lowest - 1, highest + 1) for step in _STEPS]
    return max(y for y in labels if y < min(values)), min(y for y in labels if y > max(values))


def _draw_concurrency(title: str, panels: Panels, machine: Mapping[str, str]) -> Figure:
    kinds = {panel: panel.split(", ") for panel in panels}
    rows = list(dict.fromkeys(who for who, _ in kinds.values()))
    columns = list(dict.fromkeys(size for _, size in kinds.values()))
    figure = _begin(title, machine, panels, 2.35 * len(rows), 3)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for panel, (who, size) in kinds.items():
        axes = grid[rows.index(who)][columns.index(size)]
        axes.set(title=f"{who}, tensors around {size}", xlabel=who)
        axes.set_xscale("log", base=2)
        _plot(axes, panels[panel])
        callers = sorted({x for points in panels[panel].values() for x in points})
        axes.set_ylim(0, 1.08 * max(y for points in panels[panel].values() for y in points.values()))
        axes.xaxis.set_major_locator(FixedLocator(callers))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    for axes in grid[:, 0]:
        axes.set_ylabel("calls per second")
    return _end(figure, grid.flat, 3)


class Picture(NamedTuple):
    title: str
    caption: str
    draw: Callable[[str, Panels, Mapping[str, str]], Figure]


PICTURES: Final[Mapping[str, Picture]] = {
    "latency": Picture(
        "Round trip of one tensor, there and back",
        "Medians, one request at a time. *In place*: the tensor is in shared memory already, and nothing is copied; "
        "all others copy it once on its way in, at least. In band nothing beyond 64 MiB is measured, as a call takes "
        "half a second and more there. Above 16 MiB the ways are measured one after another, in few rounds: small "
        "differences there mean nothing.",
        _draw_latency,
    ),
    "concurrency": Picture(
        "Calls per second of one process, over gRPC",
        "Client, server and model share the machine's cores. All callers of a process use one client; every tensor "
        "has another length than the one before.",
        _draw_concurrency,
    ),
}
"""In the order in which a reader sees them."""


def drawings_of(curves: Mapping[str, Panels], machine: Mapping[str, str]) -> dict[str, bytes]:
    """Return the pictures for which there are curves, as SVG by their names."""
    drawings = {}
    for name in [name for name in PICTURES if name in curves]:
        picture, content = PICTURES[name], io.BytesIO()
        with mpl.rc_context(dict(RC)):  # type: ignore[arg-type]  # names that are text, too
            figure = picture.draw(picture.title, curves[name], machine)
            figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})  # the same bytes always
        drawings[name] = content.getvalue()
    return drawings
