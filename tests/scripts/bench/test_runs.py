"""A run as JSON: what comes back of it, and what is told of a file that is none."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.tools.bench.reports import table_of
from scripts.tools.bench.runs import ReportError, Run, json_of, read_run
from scripts.tools.figures import Figure
from tests.scripts.bench.curves import MACHINE, full_run, short_run

FIGURES = [
    Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2),
    Figure("two", 0.5, "× another", "1 ms / 2 ms", at_least=1.0),
    Figure("three", 3.0, "µs", "measured alone"),
]
RUN = Run(MACHINE, FIGURES, {"what": {"case": 1.5}}, full_run())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json_of(RUN))
    found = read_run(file)
    assert found[:3] == RUN[:3]
    assert list(found.curves) == list(RUN.curves)


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(json_of(RUN._replace(curves=short_run())))
    change(content)
    return json.dumps(content)


WRONG = {
    "nothing": "",
    "not JSON": "# Numbers",
    "half a file": json_of(RUN)[:500],
    "no text": "\udcff",
    "a list": "[]",
    "an object of another program": '{"machine": {}, "results": []}',
    "of a bench without pictures": changed(lambda content: content.pop("curves")),
    "a figure without a number": changed(lambda content: content["figures"][0].update(figure="1.0")),
    "a figure that is none": changed(lambda content: content["figures"].append(7)),
    "a limit in words": changed(lambda content: content["figures"][0].update(at_most="1.2")),
    "a curve that is none": changed(lambda content: content["curves"].append(None)),
    "a curve without a name": changed(lambda content: content["curves"][0].pop("line")),
    "a time of 0": changed(lambda content: content["curves"][0].update(points=[[64, 0]])),
    "a time that is none": changed(lambda content: content["curves"][0].update(points=[[64, float("nan")]])),
    "no size": changed(lambda content: content["curves"][0].update(points=[[-1, 1.0]])),
    "a point of three numbers": changed(lambda content: content["curves"][0].update(points=[[64, 1.0, 2.0]])),
    "a size that no float holds": changed(lambda content: content["curves"][0].update(points=[[10**400, 1.0]])),
    "a time that no float holds": changed(lambda content: content["curves"][0].update(points=[[64, 10**400]])),
    "a figure that is not finite": changed(lambda content: content["figures"][0].update(figure=float("inf"))),
    "a figure that no float holds": changed(lambda content: content["figures"][0].update(figure=10**400)),
    "a limit that is not a number": changed(lambda content: content["figures"][0].update(at_most=float("nan"))),
    "a name that is no text": changed(lambda content: content["figures"][0].update(name="\ud800")),
    "a depth of many lists": "[" * 100_000,
}


@pytest.mark.parametrize("what", WRONG)
def test_another_file_is_refused_in_a_line(what: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(WRONG[what], errors="surrogateescape")
    with pytest.raises(ReportError) as caught:
        read_run(file)
    assert str(caught.value).startswith(f"{file} is not what bench --json has written: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="none.json cannot be read: No such file or directory"):
        read_run(tmp_path / "none.json")
    with pytest.raises(ReportError, match="cannot be read: Is a directory"):
        read_run(tmp_path)


def test_what_has_no_end_is_not_read() -> None:
    with pytest.raises(ReportError, match="/dev/zero cannot be read: it is no regular file"):
        read_run(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["[/bold]", "[red]", "\x1b[2J"])
def test_a_name_is_shown_as_it_is_and_obeyed_by_nobody(name: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of([Figure(name, 1.0, name, name)]))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count(repr(name)[1:-1]) == 3
    assert "\x1b" not in console.file.getvalue()
