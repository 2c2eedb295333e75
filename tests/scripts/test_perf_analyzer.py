"""The program behind ``scripts/perf_analyzer``, run as a user runs it, for one case and shortly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.tools import ROOT
from scripts.tools.perf_analyzer.cases import CASES
from scripts.tools.perf_analyzer.install import PerfAnalyzer, default_folder, install_perf_analyzer
from scripts.tools.perf_analyzer.runs import own_names
from scripts.tools.processes import children, command_line
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.server import Installation

QUANTITIES = {"inferences_per_s", "p50_ms", "p90_ms", "p99_ms"}
DEADLINE_S = 60.0
CASE = CASES["multiply-4"]

pytestmark = pytest.mark.long


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.tools.perf_analyzer", "--only", CASE.name, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(pid: int) -> list[Path]:
    """Return what a run for this case has left in shared memory."""
    names = [f"perf-analyzer-{pid}", "INPUT0_0_0", "SHM_0_0", "OUTPUT0"]
    with PerfAnalyzer(default_folder()).alone():  # the names are those of any other run, too
        return [DEV_SHM / name for name in names if (DEV_SHM / name).exists()]


class Run:
    """One that ran to its end."""

    def __init__(self, file: Path) -> None:
        process = started("--window-ms", "200", "--json", str(file))
        self.out, self.error = process.communicate(timeout=DEADLINE_S)
        self.status = process.returncode
        self.left_behind = left_behind(process.pid)
        self.report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("perf-analyzer") / "figures.json")


def test_it_measures_the_three_ways(run: Run) -> None:
    assert (run.status, run.error.strip(), run.left_behind) == (0, "", [])
    (case,) = run.report.pop("cases")
    assert run.report == {"perf_analyzer": "2.41.1", "window_ms": 200, "concurrency": 1}
    assert (case["case"], case["model"], case["shape"]) == ("multiply-4", "multiply", [4, 3, 224, 224])
    assert case["input_bytes"] == 4 * 3 * 224 * 224 * 4
    for way in ("in_band", "system", "direct"):
        assert set(case[way]) == QUANTITIES
        assert min(case[way].values()) > 0
        assert case[way]["p50_ms"] <= case[way]["p90_ms"] <= case[way]["p99_ms"]


def test_its_table_has_the_ways_side_by_side(run: Run) -> None:
    rows = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in run.out.splitlines() if line.startswith(("│", "┃"))]
    assert rows[1][1:5] == ["", "in band", "system", "direct"]
    assert [row[1] for row in rows[2:]] == ["infer/s", "p50 ms", "p90 ms", "p99 ms"]
    in_band, direct, ratio = (float(rows[3][column]) for column in (2, 4, 5))
    assert ratio == pytest.approx(in_band / direct, rel=0.05)


def runs_perf_analyzer(pid: int) -> bool:
    """Return whether a process has perf_analyzer as its child; another run may have made the objects in /dev/shm."""
    programs = [command_line(child).partition(" ")[0] for child in children(pid)]
    return any(Path(program).name == "perf_analyzer" for program in programs)


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    process = started("--window-ms", "400")
    yield process
    if process.poll() is None:  # its test has failed
        process.send_signal(signal.SIGINT)  # it removes what it has in shared memory; killed, it could not
        try:
            process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.communicate()


def test_an_interrupted_one_leaves_nothing_though_perf_analyzer_is_killed(long_run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (runs_perf_analyzer(long_run.pid) and (DEV_SHM / "OUTPUT0").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    long_run.send_signal(signal.SIGINT)
    out, error = long_run.communicate(timeout=DEADLINE_S)
    assert (long_run.returncode, out) == (128 + signal.SIGINT, "")
    assert "Traceback" not in error
    assert left_behind(long_run.pid) == []


def test_what_has_one_of_perf_analyzers_names_is_not_overwritten(tmp_path: Path) -> None:
    taken = tmp_path / "OUTPUT0"
    taken.write_bytes(b"somebody's")
    with (
        pytest.raises(MachineError, match="OUTPUT0 exists, .* wait for another perf_analyzer"),
        own_names(CASE, tmp_path),
    ):
        pytest.fail("the names are not its own")
    assert taken.read_bytes() == b"somebody's"


def test_what_perf_analyzer_leaves_is_removed(tmp_path: Path) -> None:
    with own_names(CASE, tmp_path):
        for name in ("INPUT0_0_0", "SHM_0_0", "OUTPUT0"):
            (tmp_path / name).touch()
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_the_server_does_not_bring_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"perf_analyzer needs libb64.so.0d: found no libb64-\*.so.0d in .*lib"):
        install_perf_analyzer(Installation(tmp_path / "server"), tmp_path / "perf_analyzer")
    assert list(tmp_path.iterdir()) == []
