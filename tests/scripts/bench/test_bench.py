"""``scripts/bench``: run briefly as a user runs it; and what is wrong is told in a line."""

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
from scripts.tools.bench.pictures import PICTURES

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),  # the run takes a minute on a machine that has nothing else to do
]


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
    report: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return report | {"document": (folder / "bench.md").read_text()}


def test_a_short_run_measures_what_it_was_told_to(report: dict[str, Any]) -> None:
    names = " ".join(figure["name"] for figure in report["figures"])
    for words in ("own time in execute, 8 in and 8 out", "infer, around 64 KiB", "growth after 100", "way in infer"):
        assert words in names


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


def test_a_short_run_draws_every_picture(folder: Path) -> None:
    assert {file.name for file in (folder / "images").iterdir()} == {f"{name}.svg" for name in PICTURES}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--plot", "README.md"), "README.md cannot be written: File exists"),
        (("--json", "none/bench.json"), "none/bench.json cannot be written: No such file or directory"),
        (("--plot", "docs/images", "--only", "path"), "--plot draws latency, concurrency; add one of them with --only"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_is_wrong_is_told_in_a_line(options: tuple[str, ...], told: str) -> None:
    done = bench(*options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(told)
