"""The pictures: everything that was measured is drawn, can be read and told apart, and is the same every time."""

from __future__ import annotations

import functools
import struct
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scripts.tools.bench.pictures import PICTURES, RC, Drawing, drawings_of, line_of
from tests.scripts.bench.curves import MACHINE, RUNS, full_run, runs

pictures = pytest.mark.parametrize("picture", PICTURES)
with_lines = pytest.mark.parametrize("picture", ["latency", "concurrency"])


@functools.cache
def drawn(picture: str, run: str) -> Figure:
    """Return a picture, laid out."""
    with mpl.rc_context(dict(RC)):  # type: ignore[arg-type]
        figure = PICTURES[picture].draw("A title", RUNS[run]().of(picture), MACHINE)
        FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    return figure


def panels_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


# --- what is drawn


@runs
@with_lines
def test_every_line_of_every_panel_is_drawn_point_by_point(picture: str, run: str) -> None:
    expected = [
        {(line_of(name).label, tuple(sorted(points.items()))) for name, points in lines.items()}
        for lines in RUNS[run]().of(picture).values()
    ]
    found = [
        {
            (line.get_label(), tuple(zip(line.get_xdata(), line.get_ydata(), strict=True)))  # type: ignore[arg-type]
            for line in axes.lines
        }
        for axes in panels_of(drawn(picture, run))
    ]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


@runs
def test_every_bar_is_as_long_as_was_measured_and_says_so(run: str) -> None:
    curves = [curve for curve in RUNS[run]() if curve.picture == "shapes"]
    figure = drawn("shapes", run)
    bars = [patch for axes in panels_of(figure) for patch in axes.patches if isinstance(patch, Rectangle)]
    expected = sorted(y for curve in curves for y in curve.points.values())
    assert sorted(bar.get_width() for bar in bars) == expected
    told = sorted(text.get_text() for axes in panels_of(figure) for text in axes.texts)
    assert told == sorted(f"{y:.2f}" for y in expected)


# --- files


@functools.cache
def all_drawings() -> list[Drawing]:
    return drawings_of(full_run(), MACHINE)


def test_there_are_both_files_of_each_picture_as_wide_as_a_page() -> None:
    for drawing in all_drawings():
        assert set(drawing.files) == {f"{drawing.name}.png", f"{drawing.name}.svg"}
        png, svg = drawing.files[f"{drawing.name}.png"], drawing.files[f"{drawing.name}.svg"]
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", png[16:20]) == (2 * 800,)
        root = ET.fromstring(svg)
        assert root.tag.endswith("}svg")
        assert root.get("width") == "576pt"  # a page scales it


def test_the_same_run_gives_the_same_bytes() -> None:
    again = drawings_of(full_run(), MACHINE)
    assert all_drawings() == again
    for _, _, _, files in again:
        for content in files.values():
            assert b"<dc:date>" not in content
            assert mpl.__version__.encode() not in content
