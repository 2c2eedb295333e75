"""What ``top`` draws: it fits the terminal, and the picture of the documentation is what it draws."""

from __future__ import annotations

import dataclasses
import io
import re
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from shm_backend_utils.cli.top.snapshot import RegionRow, Snapshot
from shm_backend_utils.cli.top.view import view
from tests.unit.top.picture import SNAPSHOT, URL, draw

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "top.svg"


def lines_of(snapshot: Snapshot, width: int, most_lines: int | None = None) -> list[str]:
    """Return what is drawn."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    console.print(view(snapshot, URL, console, most_lines))
    return file.getvalue().splitlines()


def many_regions(count: int) -> Snapshot:
    """Return a snapshot of so many regions, each of them used by many."""
    pids = tuple(range(10000, 10020))
    regions = [
        RegionRow("system", f"shmbu-{number}-0123456789abcdef", 2**20, 0, True, 5.0, 4, 0, pids)
        for number in range(count)
    ]
    return dataclasses.replace(SNAPSHOT, regions=regions)


@pytest.mark.parametrize("width", [80, 100, 160, 300])
def test_nothing_is_cut_off(width: int) -> None:
    lines = lines_of(SNAPSHOT, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for region in SNAPSHOT.regions:
        assert region.name.split()[-1] in words
        assert all(str(pid) in words for pid in region.pids)
    assert {model.model for model in SNAPSHOT.models} < set(words)
    assert {"1,412", "3.5", "18", "4820"} < set(words)
    assert not any("\u2026" in line for line in lines)


@pytest.mark.parametrize("width", [80, 160])
def test_columns_are_aligned(width: int) -> None:
    lines = lines_of(SNAPSHOT, width)
    head = next(line for line in lines if line.startswith("REGION "))
    rows = lines[lines.index(head) + 1 :][: len(SNAPSHOT.regions)]
    end_of_size, begin_of_owner = head.index("SIZE") + 4, head.index("OWNER")
    assert all(row[:end_of_size].endswith("MiB") and row[end_of_size] == " " for row in rows)
    assert all(row[begin_of_owner:].startswith(("alive ", "dead ")) for row in rows)


def test_a_wide_terminal_has_more_columns() -> None:
    narrow, wide = "\n".join(lines_of(SNAPSHOT, 80)), "\n".join(lines_of(SNAPSHOT, 160))
    for title in ("OWN TIME", "INSTANCES", "AGE"):
        assert title not in narrow
        assert title in wide


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("height", [50, 60, 90])
def test_it_is_not_higher_than_the_terminal(width: int, height: int) -> None:
    lines = lines_of(many_regions(200), width, height)
    assert len(lines) <= height
    (rest,) = [line for line in lines if re.fullmatch(r"and \d+ more, \d+ MiB *", line)]
    shown = sum(line.startswith("shmbu-") for line in lines)
    assert int(rest.split()[1]) == 200 - shown


def test_a_name_stays_in_one_line_however_many_use_it() -> None:
    lines = lines_of(many_regions(1), 80)
    (row,) = [line for line in lines if line.startswith("shmbu-")]
    assert row.startswith("shmbu-0-0123456789abcdef ")
    assert all(str(pid) in " ".join(lines).split() for pid in range(10000, 10020))


def test_a_name_that_fills_the_line_is_not_cut_off() -> None:
    name = "shmbu-" + "x" * 200
    region = dataclasses.replace(SNAPSHOT.regions[0], kind="system", name=name)
    snapshot = dataclasses.replace(SNAPSHOT, regions=[region])
    assert name in "".join("".join(line.split()[:1]) for line in lines_of(snapshot, 80) if "x" in line)


def test_a_terminal_without_any_room_has_no_regions() -> None:
    assert not any(line.startswith("shmbu-") for line in lines_of(many_regions(5), 80, 3))


def test_an_empty_machine_can_be_drawn() -> None:
    empty = dataclasses.replace(SNAPSHOT, models=[], remark="nobody answers", regions=[], processes=[], pools=[])
    assert "nobody answers" in lines_of(empty, 80)


def test_the_picture_is_what_is_drawn() -> None:
    """``python -m tests.unit.top.picture docs/images/top.svg`` draws it anew."""
    texts = re.findall(r"<text class=\"top-r\d+\"[^>]*>(.*?)</text>", PICTURE.read_text())
    drawn = "".join(unescape(text).replace("\xa0", " ") for text in texts)
    assert "".join(drawn.split()) == "".join(draw(110).export_text().split())
