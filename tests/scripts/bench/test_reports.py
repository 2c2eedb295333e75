"""Reports are written whole or not at all, and what cannot be written is told in a line."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from scripts.tools.bench import reports as reporting
from scripts.tools.bench.pictures import PICTURES
from scripts.tools.bench.reports import Reports
from scripts.tools.bench.runs import ReportError, Run
from scripts.tools.figures import Figure
from tests.scripts.bench.curves import MACHINE, short_run

FIGURE = Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2)
RUN = Run(MACHINE, [FIGURE], {}, short_run())
IMAGES = {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}


def all_reports(folder: Path) -> Reports:
    return Reports(folder / "bench.json", folder / "docs" / "bench.md", folder / "docs" / "images" / "new")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have half of each file written, and then no room for the rest."""
    write = Path.write_bytes

    def write_half(file: Path, content: bytes) -> int:
        write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)


def test_all_are_written_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    reports = all_reports(tmp_path)
    reports.check()
    reports.write(RUN)
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert files == IMAGES | {"bench.json", "bench.md"}


def test_the_page_shows_the_pictures_and_says_how_both_are_made(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    reports = all_reports(tmp_path)
    reports.check()
    reports.write(RUN)
    page = (tmp_path / "docs" / "bench.md").read_text()
    links = re.findall(r"^!\[(.+)\]\((.+)\)$", page, re.MULTILINE)
    assert links == [(picture.title, f"images/new/{name}.svg") for name, picture in PICTURES.items()]
    assert all((tmp_path / "docs" / link).is_file() for _, link in links)
    assert all(picture.caption in page for picture in PICTURES.values())
    assert "scripts/bench --json bench.json --document docs/bench.md --plot docs/images" in page


def test_a_page_without_pictures_shows_none(tmp_path: Path) -> None:
    Reports(document=tmp_path / "bench.md").write(RUN)
    assert "![" not in (tmp_path / "bench.md").read_text()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(tmp_path / "bench.json", tmp_path / "bench.md")
    for file in (tmp_path / "bench.json", tmp_path / "bench.md"):
        file.write_text("of before")
    fill_the_disk(monkeypatch)
    with pytest.raises(ReportError) as caught:
        reports.write(RUN)
    lines = str(caught.value).splitlines()
    assert lines == [
        f"{tmp_path / name} cannot be written: No space left on device" for name in ("bench.json", "bench.md")
    ]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "bench.json": "of before",
        "bench.md": "of before",
    }


def test_one_that_fails_does_not_keep_others_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "bench.json").mkdir()
    with pytest.raises(ReportError, match="bench.json cannot be written: "):
        Reports(tmp_path / "bench.json", tmp_path / "bench.md").write(RUN)
    assert (tmp_path / "bench.md").is_file()


def test_a_device_is_written_to_and_stays() -> None:
    with pytest.raises(ReportError, match=r"^/dev/full cannot be written: No space left on device$"):
        reporting.write(Path("/dev/full"), b"x")
    reporting.write(Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("of before")
    (tmp_path / "link").symlink_to("real")
    reporting.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


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
