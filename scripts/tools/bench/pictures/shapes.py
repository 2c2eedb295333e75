"""The picture of varying shapes: bars in pairs, a panel for each size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .drawing import Panels, begin, label_of_bytes, line_of
from .style import INK

__all__ = ["CAPTION", "TITLE", "draw"]

TITLE: Final = "Round trips with tensors of one length, and of many, over gRPC"
CAPTION: Final = (
    "Medians, one request at a time: tensors of one length, and tensors from half of it to half as much again, no two "
    "of them alike. Triton's shared memory is registered once, with room for the largest. `ShmClient.infer` is held to "
    "the direct path; by itself it sends the smallest in band."
)

# What a kind is called, and how dark its bars are.
_KINDS: Final = {"repeated": ("all of one length", 0.45), "varying": ("each of another length", 1.0)}
_BAR: Final = 0.36
_ROOM: Final = 1.42
"""How far a panel goes, over its longest bar: the numbers beside the bars need some room."""


def draw(panels: Panels, machine: Mapping[str, str]) -> Figure:
    """Draw milliseconds of each way."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    sizes = sorted({size for lines in panels.values() for points in lines.values() for size in points})
    figure = begin(TITLE, machine, 0.62 * len(names) + 0.75, 1)
    all_axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(all_axes, sizes, strict=True):
        for row, name in enumerate(names):
            for place, (kind, (_, alpha)) in enumerate(_KINDS.items()):
                milliseconds = panels.get(kind, {}).get(name, {}).get(size)
                if milliseconds is not None:
                    y = row + (place - 0.5) * (_BAR + 0.04)
                    axes.barh(y, milliseconds, _BAR, color=line_of(name).color, alpha=alpha)
                    axes.annotate(
                        f"{milliseconds:.2f}",
                        (milliseconds, y),
                        (4, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8.5,
                    )
        axes.set_xlim(0, _ROOM * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_title(f"around {label_of_bytes(size)}")
        axes.set_xlabel("ms")
    all_axes[0].set_yticks(range(len(names)), [line_of(name).label.replace(", ", ",\n") for name in names])
    all_axes[0].invert_yaxis()
    handles = [Patch(color=INK, alpha=alpha, label=label) for label, alpha in _KINDS.values()]
    figure.legend(handles=handles, loc="lower center", ncols=2).set_in_layout(False)
    return figure
