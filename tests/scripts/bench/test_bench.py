"""``scripts/bench``: run briefly as a user runs it, what its reports say, and whether its checks can fail."""

from __future__ import annotations

import json
import mmap
import os
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
from scripts.tools.bench.bench import FULL
from scripts.tools.bench.groups.own_time import functions_called
from scripts.tools.bench.machine import resident_bytes, sealed_bytes, shared_bytes
from scripts.tools.bench.payloads import endless, uploads_of, varying
from scripts.tools.bench.random_requests import RandomRequests
from scripts.tools.bench.rates import rate_of_threads, rate_ratio
from scripts.tools.bench.reports import COLUMNS, MEASURED_ELSEWHERE, cells_of, document_of
from scripts.tools.bench.runs import as_json
from scripts.tools.figures import Figure
from shm_backend_utils.client import Result
from shm_backend_utils.dtypes import from_numpy
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion

pytestmark = pytest.mark.long

HELD = Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2)
NOT_HELD = Figure("two", 0.5, "× another", "1 ms / 2 ms", at_least=1.0)
WITHOUT_LIMIT = Figure("three", 3.0, "µs", "measured alone")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What some groups measure, and the document."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--quick", "--rounds", "2", "--requests", "100"]
    for group in ("own-time", "sealed", "stock", "uploads", "growth", "functions"):
        options += ["--only", group]
    subprocess.run(
        [
            *(sys.executable, "-m", "scripts.tools.bench", *options),
            *("--json", str(folder / "bench.json"), "--document", str(folder / "bench.md")),
        ],
        cwd=ROOT,
        capture_output=True,
        timeout=110,
        check=True,
    )
    report: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    report["document"] = (folder / "bench.md").read_text()
    return report


def test_a_short_run_measures_what_it_was_told_to(report: dict[str, Any]) -> None:
    names = " ".join(figure["name"] for figure in report["figures"])
    for words in ("own time in execute, 8 in and 8 out", "infer, around 64 KiB", "growth after 100", "way in infer"):
        assert words in names


def test_uploads_are_held_to_a_rate_for_each_size_and_number_of_threads(report: dict[str, Any]) -> None:
    limits = {figure["name"]: figure["held_to"] for figure in report["figures"] if "uploads" in figure["name"]}
    assert limits == {
        f"{protocol}: uploads of around {size}, {threads}, shapes varying": limit
        for protocol in ("grpc", "http")
        for size, limit in (("50 KB", "at least 1"), ("1 MB", "at least 1.5"))
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


# --- reports


def test_a_row_says_whether_its_limit_is_held() -> None:
    holds = COLUMNS.index("holds")
    assert [cells_of(figure)[holds] for figure in (HELD, NOT_HELD, WITHOUT_LIMIT)] == ["yes", "no", ""]
    assert [as_json(figure)["holds"] for figure in (HELD, NOT_HELD, WITHOUT_LIMIT)] == [True, False, None]


def test_a_document_counts_the_limits_and_names_those_that_are_not_held() -> None:
    text = document_of([HELD, NOT_HELD, WITHOUT_LIMIT], {"cores": "2"})
    assert "1 of 2 limits are held. Not held: two." in text
    assert all(elsewhere.name in text for elsewhere in MEASURED_ELSEWHERE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.count("|") in (3, 1 + len(COLUMNS)) for row in rows)


def test_fewer_rounds_are_fewer_slow_rounds() -> None:
    amounts = FULL.with_rounds(20).with_requests(7)
    assert (amounts.rounds, amounts.slow_rounds, amounts.requests) == (20, 2, 7)
    assert FULL.with_rounds(3).slow_rounds == 1


# --- parts


def test_arrays_that_vary_have_lengths_around_the_one_that_was_asked_for() -> None:
    arrays = varying(4096)
    lengths = [array.nbytes for array in arrays]
    assert (min(lengths), max(lengths)) == (2048, 6144)
    assert abs(np.mean(lengths) - 4096) < 64
    assert len(set(lengths)) > 200
    given = endless(arrays, first=len(arrays) - 1)
    assert [next(given).nbytes for _ in range(2)] == [lengths[-1], lengths[0]]


def test_no_two_uploads_have_the_same_shape_and_each_has_the_sums_of_its_rows() -> None:
    uploads = uploads_of(50_000)
    sizes = [upload.x.nbytes for upload in uploads]
    assert len({upload.x.shape for upload in uploads}) == len(uploads) > 200
    assert 25_000 * 0.98 < min(sizes) < max(sizes) <= 75_000
    assert abs(np.mean(sizes) - 50_000) < 1_000
    for upload in uploads[:10]:
        assert upload.sums.tolist() == upload.x.astype(np.int64).sum(axis=1).tolist()


def test_a_rate_is_of_all_threads_each_beginning_elsewhere() -> None:
    together = threading.Barrier(3)
    firsts: list[int] = []

    def call(x: int) -> None:
        if len(firsts) < 3:
            firsts.append(x)
            together.wait(5)

    with ThreadPoolExecutor(3) as pool:
        assert rate_of_threads(pool, call, list(range(100)), threads=3, seconds=0.05) > 3
    assert len(set(firsts)) == 3


def test_a_call_that_fails_ends_the_measurement() -> None:
    def call(x: int) -> None:
        raise AssertionError("a wrong answer")

    with ThreadPoolExecutor(2) as pool, pytest.raises(AssertionError, match="a wrong answer"):
        rate_of_threads(pool, call, [1], threads=2, seconds=0.05)


def test_rates_are_compared_period_by_period() -> None:
    figure = rate_ratio("calls", {"ours": [10.0, 40.0, 30.0], "stock": [10.0, 20.0, 10.0]}, "× others", at_least=1.5)
    assert (figure.figure, figure.basis, figure.is_held) == (2.0, "30 /s / 10 /s", True)


def test_functions_of_the_package_are_counted_once_and_no_others() -> None:
    def work() -> None:
        for _ in range(2):
            from_numpy(np.dtype(np.float32), "x")
            json.dumps([1])

    assert "dtypes:from_numpy" in functions_called(work)
    assert functions_called(lambda: json.dumps([1])) == []


def test_memory_is_counted_as_it_grows() -> None:
    own, resident = "bench-test-", resident_bytes(os.getpid())
    path = Path(f"/dev/shm/{own}{os.getpid()}")
    before = shared_bytes(own)
    try:
        path.write_bytes(bytes(1 << 16))
        assert shared_bytes(own) - before == 1 << 16
    finally:
        path.unlink()
    with mmap.mmap(
        -1, 1 << 22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:  # the allocator might give what was resident before
        held.write(bytes(1 << 22))
        assert resident_bytes(os.getpid()) - resident > 1 << 21


class Forgetful:
    """A client whose model adds nothing."""

    def infer(self, model: str, inputs: dict[str, Any], **named: Any) -> Result:
        return Result({f"Y{name[1:]}": array for name, array in inputs.items()}, "direct", lambda: None)


def test_sealed_memory_is_counted_as_it_is_mapped() -> None:
    before = sealed_bytes(os.getpid())
    region = ManagedRegion.create(100, kind=RegionKind.SEALED)
    assert sealed_bytes(os.getpid()) - before == region.header.byte_size
    region.close()


def test_wrong_answers_to_requests_at_random_are_counted() -> None:
    requests = RandomRequests(Forgetful())  # type: ignore[arg-type]
    requests.send(50)
    assert requests.answers == 50
    assert requests.wrong > 20
