"""``scripts/bench``: run briefly as a user runs it; what it sends, how it counts, and what it says of limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.tools import ROOT
from scripts.tools.bench.groups.own_time import functions_called
from scripts.tools.bench.groups.throughput import rate_of_threads
from scripts.tools.bench.pictures import PICTURES
from scripts.tools.bench.random_requests import RandomRequests
from scripts.tools.bench.reports import COLUMNS, as_json, cells_of
from scripts.tools.figures import Figure
from shm_backend_utils.client import Result
from shm_backend_utils.dtypes import from_numpy


def test_a_rate_is_of_all_threads_each_beginning_elsewhere() -> None:
    together = threading.Barrier(3)
    firsts: list[int] = []

    def call(x: int) -> None:
        if len(firsts) < 3:
            firsts.append(x)
            together.wait(5)

    with ThreadPoolExecutor(3) as pool:
        assert rate_of_threads(pool, call, list(range(100)), threads=3, seconds=0.5) > 3
    assert len(set(firsts)) == 3


def test_a_call_that_fails_ends_the_measurement_and_one_that_is_over_at_once_has_a_call_of_each_thread() -> None:
    def call(x: int) -> None:
        assert x == 1, "a wrong answer"

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(AssertionError, match="a wrong answer"):
            rate_of_threads(pool, call, [2], threads=2, seconds=60)  # not waited for
        assert rate_of_threads(pool, call, [1], threads=1, seconds=0) > 0


def test_functions_of_the_package_are_counted_once_and_no_others() -> None:
    def work() -> None:
        for _ in range(2):
            from_numpy(np.dtype(np.float32), "x")
            json.dumps([1])

    assert "dtypes:from_numpy" in functions_called(work)
    assert functions_called(lambda: json.dumps([1])) == []


class Forgetful:
    """A client whose model adds nothing."""

    def infer(self, model: str, inputs: dict[str, Any], **named: Any) -> Result:
        return Result({f"Y{name[1:]}": array for name, array in inputs.items()}, "direct", lambda: None)


def test_wrong_answers_to_requests_at_random_are_counted() -> None:
    requests = RandomRequests(Forgetful())  # type: ignore[arg-type]
    requests.send(50)
    assert requests.answers == 50
    assert requests.wrong > 20


def test_a_row_says_whether_its_limit_is_held() -> None:
    for limits, said, holds in (({"at_most": 1.2}, "yes", True), ({"at_least": 1.2}, "no", False), ({}, "", None)):
        figure = Figure("one", 1.0, "× another", "1 ms / 1 ms", **limits)
        assert (cells_of(figure)[COLUMNS.index("holds")], as_json(figure)["holds"]) == (said, holds)


# Runs of the whole


def bench(*options: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.tools.bench", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.long
@pytest.mark.timeout(300)  # it takes a minute on a machine that has nothing else to do
def test_a_short_run_measures_what_it_was_told_to(tmp_path: Path) -> None:
    groups = ("own-time", "sealed", "stock", "uploads", "growth", "functions", *PICTURES)
    amounts = ("--quick", "--rounds", "2", "--requests", "100", *(f"--only={group}" for group in groups))
    files = {name: tmp_path / name for name in ("json", "document", "plot")}
    done = bench(*amounts, *(f"--{name}={file}" for name, file in files.items()), timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert list(Path("/dev/shm").glob("bench-*")) == []
    assert {file.name for file in files["plot"].iterdir()} == {f"{name}.svg" for name in PICTURES}
    figures, document = json.loads(files["json"].read_text())["figures"], files["document"].read_text()
    names = " ".join(figure["name"] for figure in figures)
    for words in ("own time in execute, 8 in and 8 out", "infer, around 64 KiB", "growth after 100", "way in infer"):
        assert words in names
    (wrong,) = [figure for figure in figures if figure["name"].startswith("wrong answers")]
    assert (wrong["figure"], wrong["holds"]) == (0, True)
    assert re.match(r"100 answers, \d+ of them with overflows", wrong["basis"])
    assert f"| NumPy | {np.__version__} |" in document
    assert all(figure["name"] in document for figure in figures)
    assert str(Path.home()) not in document


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--plot", "README.md"), "[Errno 17] File exists: 'README.md'"),
        (("--json", "none/bench.json"), "[Errno 2] No such file or directory: 'none/bench.json'"),
        (("--plot", "docs/images", "--only", "path"), "--plot draws latency, concurrency; add one of them with --only"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_is_wrong_is_told_in_a_line(options: tuple[str, ...], told: str) -> None:
    done = bench(*options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(told)
