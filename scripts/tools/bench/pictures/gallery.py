"""All pictures, by the names of the groups that measure them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from ..curves import Curves
from . import concurrency, latency, shapes
from .drawing import Drawing, Panels, saved
from .style import RC

__all__ = ["PICTURES", "Picture", "drawings_of"]


class Picture(NamedTuple):
    """How a picture is drawn, and what is said of it."""

    title: str
    caption: str
    draw: Callable[[Panels, Mapping[str, str]], Figure]


PICTURES: Final[Mapping[str, Picture]] = {
    "latency": Picture(latency.TITLE, latency.CAPTION, latency.draw),
    "concurrency": Picture(concurrency.TITLE, concurrency.CAPTION, concurrency.draw),
    "shapes": Picture(shapes.TITLE, shapes.CAPTION, shapes.draw),
}
"""In the order in which a reader sees them."""


def drawings_of(curves: Curves, machine: Mapping[str, str]) -> list[Drawing]:
    """Draw the pictures that a run has curves of."""
    drawings = []
    for name, picture in PICTURES.items():
        panels = curves.of(name)
        if panels:
            with mpl.rc_context(dict(RC)):  # type: ignore[arg-type]  # names that are text, too
                files = saved(picture.draw(panels, machine), name)
            drawings.append(Drawing(name, picture.title, picture.caption, files))
    return drawings
