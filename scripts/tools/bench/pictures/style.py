"""How the pictures look: one line's colour, dashes and marker are the same in all of them.

The colours are those of Okabe and Ito, which people who see fewer colours can tell apart as well. This library's lines
are whole, the others dashed, and no two have the same marker. The background is white, so the pictures are legible on a
dark page, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["FAINT", "GRID", "INK", "LINES", "RC", "WIDTH_INCHES", "Line"]

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
