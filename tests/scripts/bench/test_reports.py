"""Reports: what they say, and that a run comes back as it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.bench.pictures import PICTURES
from scripts.tools.bench.reports import COLUMNS, MEASURED_ELSEWHERE, Reports, cells_of, document_of
from scripts.tools.bench.runs import ReportError, Run, as_json, json_of, read_run
from scripts.tools.figures import Figure
from tests.scripts.bench.curves import MACHINE, short_run

FIGURES = [
    Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2),
    Figure("two", 0.5, "× another", "1 ms / 2 ms", at_least=1.0),
    Figure("three", 3.0, "µs", "measured alone"),
]
RUN = Run(MACHINE, FIGURES, {"what": {"case": 1.5}}, short_run())
IMAGES = {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}


def test_a_row_says_whether_its_limit_is_held() -> None:
    holds = COLUMNS.index("holds")
    assert [cells_of(figure)[holds] for figure in FIGURES] == ["yes", "no", ""]
    assert [as_json(figure)["holds"] for figure in FIGURES] == [True, False, None]


def test_a_document_counts_the_limits_and_names_those_that_are_not_held() -> None:
    text = document_of(FIGURES, {"cores": "2"})
    assert "1 of 2 limits are held. Not held: two." in text
    assert all(elsewhere.name in text for elsewhere in MEASURED_ELSEWHERE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.count("|") in (3, 1 + len(COLUMNS)) for row in rows)


# --- files


def all_reports(folder: Path) -> Reports:
    return Reports(folder / "bench.json", folder / "docs" / "bench.md", folder / "docs" / "images" / "new")


def test_the_page_shows_the_pictures_and_says_how_both_are_made(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    reports = all_reports(tmp_path)
    reports.check()
    reports.write(RUN)
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert files == IMAGES | {"bench.json", "bench.md"}
    page = (tmp_path / "docs" / "bench.md").read_text()
    links = re.findall(r"^!\[(.+)\]\((.+)\)$", page, re.MULTILINE)
    assert links == [(picture.title, f"images/new/{name}.svg") for name, picture in PICTURES.items()]
    assert all((tmp_path / "docs" / link).is_file() for _, link in links)
    assert all(picture.caption in page for picture in PICTURES.values())
    assert "scripts/bench --json bench.json --document docs/bench.md --plot docs/images" in page


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (Reports(json=Path("none/bench.json")), "none/bench.json cannot be written: No such file or directory"),
        (Reports(json=Path()), ". cannot be written: it is a folder; expected a file"),
        (Reports(document=Path("file/bench.md")), "file/bench.md cannot be written: Not a directory"),
        (Reports(pictures=Path("file")), "file cannot be written: File exists"),
        (Reports(pictures=Path("file/images")), "file/images cannot be written: Not a directory"),
        (Reports(pictures=Path("/proc/images")), "/proc/images cannot be written: No such file or directory"),
        (Reports(pictures=Path("/proc")), "/proc cannot be written: "),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    reports: Reports, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(ReportError) as caught:
        reports.check()
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


# --- a run as JSON


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json_of(RUN))
    found = read_run(file)
    assert found[:3] == RUN[:3]
    assert list(found.curves) == list(RUN.curves)


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(json_of(RUN))
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
    "a figure that is none": changed(lambda content: content["figures"].append(7)),
    "a curve that is none": changed(lambda content: content["curves"].append(None)),
    "a curve without a name": changed(lambda content: content["curves"][0].pop("line")),
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
