"""How pictures look, and what their parts have in common: a line has one colour, dashes and marker in all of them.

The colours are those of Okabe and Ito, which people who see fewer colours can tell apart as well. This library's lines
are whole, the others dashed, and no two have the same marker. The background is white, so the pictures are legible on a
dark page, too.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

WIDTH_INCHES: Final = 8.0
"""800 pixels at the 100 dots per inch that the sizes of fonts are meant for."""

INK: Final = "#1f2933"
FAINT: Final = "#52606d"
GRID: Final = "#d9dee3"

RC: Final[Mapping[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.0,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "shm_backend_utils",  # the same names of clip paths every time
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9.0,
    "ytick.color": INK,
    "ytick.labelsize": 9.0,
}


class Line(NamedTuple):
    """How one line looks, and what it is called."""

    label: str
    color: str
    marker: str
    dashes: str = "-"

    @property
    def options(self) -> dict[str, Any]:
        """For ``Axes.plot``."""
        return {"label": self.label, "color": self.color, "marker": self.marker, "linestyle": self.dashes}


_OURS: Final = Line("ShmClient.infer", "#0072B2", "s")
_STOCK: Final = Line("tritonclient, in band", "#D55E00", "X", "--")

LINES: Final[Mapping[str, Line]] = {
    "in place": Line("ShmClient.prepare, in place", "#009E73", "o"),
    "direct": Line("ShmClient.infer, direct", "#0072B2", "s"),
    "triton-shm": Line("ShmClient.infer, triton-shm", "#56B4E9", "^"),
    "inline": Line("ShmClient.infer, inline", "#E69F00", "D"),
    "ours": _OURS,
    "stock": _STOCK,
    "stock in band": _STOCK,
    "stock triton shm": Line("tritonclient, Triton's shared memory", "#CC79A7", "v", "--"),
    "triton-shm-client": Line("triton-shm-client", "#6B4C9A", "P", "-."),
    "empty": Line("an empty request", "#000000", "", ":"),
}
"""By the names that the curves have."""


Panels = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Points, by panel and line."""

_DOTS_PER_INCH: Final = 200  # twice as many as a page shows: sharp on screens with small pixels
_TITLE_INCHES: Final = 0.62
_ROW_INCHES: Final = 0.22
_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Drawing(NamedTuple):
    """A picture as PNG and SVG; ``name`` is that of its files, without the suffix."""

    name: str
    title: str
    caption: str
    files: dict[str, bytes]


def begin(title: str, machine: Mapping[str, str], panels_inches: float, legend_rows: int) -> Figure:
    """Return a figure with its title and a line about the machine, with room for panels and, below, for a legend."""
    legend_inches = _ROW_INCHES * legend_rows + 0.1
    height = _TITLE_INCHES + panels_inches + legend_inches
    bottom, top = legend_inches / height, 1 - _TITLE_INCHES / height
    layout = ConstrainedLayoutEngine(rect=(0.008, bottom, 0.984, top - bottom), wspace=0.04)
    figure = Figure((WIDTH_INCHES, height), layout=layout)
    figure.text(0.015, 1 - 0.07 / height, title, fontsize=12.5, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.34 / height, _about(machine), fontsize=9, color=FAINT, va="top")
    return figure


def _about(machine: Mapping[str, str]) -> str:
    cores = machine.get("cores", "")
    words = [
        f"{machine.get('processor', '')}, {cores} core{'s' if cores != '1' else ''}" if cores else "",
        *(f"{name} {machine[name]}" for name in ("Triton", "Python", "NumPy") if name in machine),
        machine.get("date", ""),
        machine.get("run", ""),
    ]
    return "  ·  ".join(word for word in words if word)


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int) -> None:
    """Name every line of all panels once, below them."""
    named: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    legend = figure.legend(
        named.values(), named, loc="lower center", ncols=columns, handlelength=3.2, columnspacing=1.6
    )
    legend.set_in_layout(False)  # it has its place already


def saved(figure: Figure, name: str) -> dict[str, bytes]:
    """Return the files of a picture: the same bytes for the same data."""
    return {
        f"{name}.png": _saved(figure, "png", {"Software": None}),
        f"{name}.svg": _saved(figure, "svg", {"Date": None, "Creator": None}),
    }


def _saved(figure: Figure, suffix: str, metadata: Mapping[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=_DOTS_PER_INCH, metadata=dict(metadata))
    return buffer.getvalue()


def line_of(name: str) -> Line:
    """Return how a line looks; one that nobody knows is black and has its own name."""
    return LINES.get(name) or Line(name, "#000000", ".", "-.")


def label_of_bytes(byte_size: float) -> str:
    """Return a number of bytes in words, such as ``4 KiB``."""
    unit, name = next((each for each in _UNITS if byte_size >= each[0]), _UNITS[-1])
    return f"{byte_size / unit:g} {name}"
