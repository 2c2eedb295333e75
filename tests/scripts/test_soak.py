"""``scripts/soak``, run for a few seconds as a user runs it, and whether its checks can fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PROGRAMS = Path(__file__).resolve().parents[2] / "scripts" / "programs"
SECONDS = 6
SEED = 4
MUST_BE_ZERO = ("wrong bytes", "leaks", "unexpected server deaths", "hangs", "clients that failed to end")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("soak") / "report.json"
    options = ["--seconds", str(SECONDS), "--clients", "2", "--seed", str(SEED), "--json", str(file)]
    soak = subprocess.run(
        [sys.executable, str(PROGRAMS / "soak.py"), *options], capture_output=True, text=True, timeout=110, check=False
    )
    report: dict[str, Any] = json.loads(file.read_text())
    assert (soak.returncode == 0) == report["good"], soak.stderr
    return report


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_workload", PROGRAMS / "soak_workload.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_soak_sends_requests_to_every_model(report: dict[str, Any]) -> None:
    assert {name.split(",")[0] for name in report["requests"]["by"]} == {"identity", "multiply", "halves"}


def test_a_short_soak_does_harm(report: dict[str, Any]) -> None:
    assert sum(report["faults"].values()) > 0


@pytest.mark.parametrize("what", MUST_BE_ZERO)
def test_a_short_soak_finds_nothing_that_must_not_be(report: dict[str, Any], what: str) -> None:
    assert report["failures"][what] == 0


def test_a_result_with_one_wrong_byte_is_found(workload: ModuleType) -> None:
    payload = workload.WORKLOADS["halves"].payload(workload.Noise(1))
    result = workload.WORKLOADS["halves"].expected(payload).copy()
    assert workload.is_right(result, workload.WORKLOADS["halves"].expected(payload))
    result.view(np.uint8)[-1] ^= 1
    assert not workload.is_right(result, workload.WORKLOADS["halves"].expected(payload))


def test_a_result_of_another_shape_is_found(workload: ModuleType) -> None:
    assert not workload.is_right(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))


def test_a_view_that_changes_while_it_is_held_is_found(workload: ModuleType) -> None:
    views = workload.HeldViews(limit=2)
    changing, steady = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    views.hold(changing, 2)
    views.hold(steady, 2)
    assert views.pass_call() == 0
    changing[3] = 1
    assert views.pass_call() == 1
