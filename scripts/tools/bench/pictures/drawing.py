"""One picture as files, and what its parts have in common."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .style import FAINT, LINES, WIDTH_INCHES, Line

__all__ = ["Drawing", "Panels", "begin", "label_of_bytes", "legend_below", "line_of", "saved"]

Panels = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Points, by panel and line."""

_DOTS_PER_INCH: Final = 200  # twice as many as a page shows: sharp on screens with small pixels
_TITLE_INCHES: Final = 0.62
_ROW_INCHES: Final = 0.22
_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Drawing(NamedTuple):
    """A picture.

    Attributes
    ----------
    name : str
        Its files', without the suffix.
    title, caption : str
        What it shows, in a line; what to know of how that was measured.
    files : dict of str to bytes
        As PNG and as SVG.
    """

    name: str
    title: str
    caption: str
    files: dict[str, bytes]


def begin(title: str, machine: Mapping[str, str], panels_inches: float, legend_rows: int) -> Figure:
    """Return a figure with its title and a line about the machine, with room for panels and, below, for a legend.

    Parameters
    ----------
    title : str
        At the top.
    machine : mapping of str to str
        What the run was on.
    panels_inches : float
        How high the panels are together, with their labels.
    legend_rows : int
        How many lines the legend has.
    """
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
