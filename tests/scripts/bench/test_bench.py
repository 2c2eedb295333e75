"""``scripts/bench``: run briefly as a user runs it, and drawn again; and what is wrong is told in a line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.tools import ROOT
from scripts.tools.bench import __main__ as command
from scripts.tools.bench import ways
from scripts.tools.bench.groups import GROUPS, WITH_OTHER_CLIENT
from scripts.tools.bench.pictures import PICTURES
from scripts.tools.bench.runs import ReportError
from scripts.tools.bench.ways import WAYS, ways_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),  # the run takes a minute on a machine that has nothing else to do
]
FILES = {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}


def bench(*options: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.tools.bench", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a short run of some groups, and of all that are drawn, has written."""
    folder = tmp_path_factory.mktemp("bench")
    groups = ("own-time", "sealed", "stock", "uploads", "growth", "functions", *PICTURES)
    done = bench(
        *("--quick", "--rounds", "2", "--requests", "100", *(word for group in groups for word in ("--only", group))),
        *(
            "--json",
            str(folder / "bench.json"),
            "--document",
            str(folder / "bench.md"),
            "--plot",
            str(folder / "images"),
        ),
        timeout_s=280,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """What was measured, and the document."""
    report: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return report | {"document": (folder / "bench.md").read_text()}


@pytest.fixture(scope="module")
def curves(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every line that the run measured."""
    found: list[dict[str, Any]] = report["curves"]
    return found


def test_a_short_run_measures_what_it_was_told_to(report: dict[str, Any]) -> None:
    names = " ".join(figure["name"] for figure in report["figures"])
    for words in ("own time in execute, 8 in and 8 out", "infer, around 64 KiB", "growth after 100", "way in infer"):
        assert words in names


def test_uploads_are_held_to_a_rate_for_each_size_and_number_of_threads(report: dict[str, Any]) -> None:
    limits = {figure["name"]: figure["held_to"] for figure in report["figures"] if "uploads" in figure["name"]}
    assert limits == {
        f"{protocol}: uploads of around {size}, {threads}, shapes varying": limit
        for protocol in ("grpc", "http")
        for size, limit in (("50 KB", "at least 1.2"), ("1 MB", "at least 1.5"))
        for threads in ("1 thread", "4 threads")
    }


def test_sealed_memory_is_held_to_that_of_dev_shm(report: dict[str, Any]) -> None:
    figures = [figure for figure in report["figures"] if "sealed region" in figure["name"]]
    assert {figure["name"]: figure["held_to"] for figure in figures} == {
        f"{protocol}: infer of {size}, {case}": limit
        for protocol in ("grpc", "http")
        for size in ("4 KiB", "16 MiB")
        for case, limit in (
            ("the first in a new sealed region", "at most 3"),
            ("in a sealed region that the model knows", "at most 1.05"),
        )
    }


def test_every_answer_to_requests_at_random_was_right(report: dict[str, Any]) -> None:
    (wrong,) = [figure for figure in report["figures"] if figure["name"].startswith("wrong answers")]
    assert (wrong["figure"], wrong["holds"]) == (0, True)
    assert re.match(r"100 answers, \d+ of them with overflows", wrong["basis"])


def test_the_document_describes_the_machine_and_has_every_figure(report: dict[str, Any]) -> None:
    assert f"| NumPy | {np.__version__} |" in report["document"]
    assert all(figure["name"] in report["document"] for figure in report["figures"])
    assert str(Path.home()) not in report["document"]


def test_nothing_is_left_in_shared_memory(report: dict[str, Any]) -> None:
    assert report
    assert list(Path("/dev/shm").glob("bench-*")) == []


# --- pictures


def test_a_short_run_draws_every_picture_in_both_formats(folder: Path) -> None:
    assert {file.name for file in (folder / "images").iterdir()} == FILES


def test_latency_has_every_path_every_peer_and_the_floor(curves: list[dict[str, Any]]) -> None:
    found = {(each["panel"], each["line"]): each["points"] for each in curves if each["picture"] == "latency"}
    assert set(found) == {(protocol, name) for protocol in ("grpc", "http") for name in ways_of(protocol)}
    assert {name for _, name in found} == set(WAYS)
    for points in found.values():
        assert [size for size, _ in points] == [4**exponent for exponent in range(3, 11)]


def test_throughput_goes_from_one_caller_to_many(curves: list[dict[str, Any]]) -> None:
    found = [each for each in curves if each["picture"] == "concurrency"]
    assert {each["line"] for each in found} == {"ours", "stock", "stock triton shm"}
    assert len({each["panel"] for each in found}) == 4
    for each in found:
        assert [callers for callers, _ in each["points"]] == [1, 4, 16, 64]


def test_shapes_that_vary_are_beside_those_that_do_not(curves: list[dict[str, Any]]) -> None:
    found = {(each["panel"], each["line"]) for each in curves if each["picture"] == "shapes"}
    lines = ("direct", "stock in band", "stock triton shm", "triton-shm-client")
    assert found == {(kind, line) for kind in ("repeated", "varying") for line in lines}


def test_it_is_drawn_again_without_measuring_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    done = bench("--from", str(folder / "bench.json"), "--plot", str(tmp_path / "again"))
    assert (done.returncode, done.stderr) == (0, "")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / "images" / name).read_bytes()


# --- what is wrong


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--plot", "README.md"), "README.md cannot be written: File exists"),
        (("--json", "none/bench.json"), "none/bench.json cannot be written: No such file or directory"),
        (("--from", "README.md"), "README.md is not what bench --json has written: "),
        (("--from", "none.json"), "none.json cannot be read: No such file or directory"),
        (("--from", "x.json", "--quick"), "--from measures nothing, so there is nothing to do for --quick"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_is_wrong_is_told_in_a_line(options: tuple[str, ...], told: str) -> None:
    done = bench(*options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(told)


def test_a_group_that_nobody_knows_is_told() -> None:
    done = bench("--only", "nonsense")
    assert done.returncode == 2
    assert "argument --only: invalid choice: 'nonsense'" in done.stderr
    assert "usage: scripts/bench" in done.stderr


def test_a_run_that_measured_nothing_to_draw_is_not_drawn(tmp_path: Path) -> None:
    content: dict[str, Any] = {"machine": {}, "figures": [], "medians_ms": {}, "curves": []}
    (tmp_path / "bench.json").write_text(json.dumps(content))
    done = bench("--from", str(tmp_path / "bench.json"), "--plot", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'bench.json'} has nothing to draw: no {', '.join(PICTURES)}\n"


def test_a_picture_is_not_asked_for_of_other_groups() -> None:
    with pytest.raises(ReportError, match="--plot draws latency, concurrency, shapes; add one of them"):
        command.groups_to_measure(["path"], draws=True)
    assert command.groups_to_measure(["path", "shapes"], draws=True) == ["path", "shapes"]


# --- triton-shm-client, which no extra has


def test_without_it_its_rows_and_lines_are_left_out_which_a_line_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.groups_to_measure(None, draws=False) == list(GROUPS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(ways, "_MODULE", "no_such_module")
    left = [group for group in GROUPS if group not in WITH_OTHER_CLIENT]
    assert command.groups_to_measure(None, draws=False) == left
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "triton-shm-client is not installed: its rows and lines are left out"
    assert set(ways_of("grpc")) == set(WAYS) - {"triton-shm-client"}


def test_asked_for_by_name_it_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_MODULE", "no_such_module")
    with pytest.raises(ReportError, match="^compat: triton-shm-client is not installed; pip install --no-deps"):
        command.groups_to_measure(["path", "compat"], draws=False)
