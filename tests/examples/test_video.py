"""The video: every frame's edges, in order, without a copy of a frame."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from examples.video.client import edges_of, make_video
from examples.video.measure import measure

from ..e2e.own_regions import lies_in_shared_memory
from .recipes import run_script

FRAMES = 12


@pytest.fixture
def video(tmp_path: Path) -> Path:
    file = tmp_path / "square.avi"
    make_video(file, size=(320, 240), frames=FRAMES)
    return file


def test_the_edges_of_all_frames_come_in_order(url: str, video: Path) -> None:
    columns = []
    for edges in edges_of(video, url):
        assert lies_in_shared_memory(edges)
        columns.append(int(edges.any(axis=0).argmax()))
        del edges
    assert len(columns) == FRAMES
    steps = [later - earlier for earlier, later in pairwise(columns[1:])]  # in the first the square touches the border
    assert steps == [8] * len(steps)


def test_who_stops_early_leaves_nothing_behind(url: str, video: Path) -> None:
    frames = edges_of(video, url)
    assert next(frames).any()
    frames.close()  # type: ignore[attr-defined]  # it is a generator


def test_the_script_makes_a_video_and_says_where_the_edges_are(url: str, tmp_path: Path) -> None:
    lines = run_script("video/client.py", str(tmp_path / "new.avi"), url).splitlines()
    assert len(lines) == 50
    assert lines[10].startswith("frame 10: the leftmost edge is in column ")


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1, frames=3).values()) > 0
