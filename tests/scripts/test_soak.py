"""``scripts/soak``, run for a few seconds as a user runs it, and whether its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from scripts.tools import ROOT
from scripts.tools.soak.client.checks import HeldViews, is_right
from scripts.tools.soak.client.models import MODELS, Noise, Said

SECONDS = 6
SEED = 4
MUST_BE_ZERO = ("wrong bytes", "leaks", "unexpected server deaths", "hangs", "clients that failed to end")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("soak") / "report.json"
    options = ["--seconds", str(SECONDS), "--clients", "2", "--seed", str(SEED), "--json", str(file)]
    soak = subprocess.run(
        [sys.executable, "-m", "scripts.tools.soak", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    report: dict[str, Any] = json.loads(file.read_text())
    assert (soak.returncode == 0) == report["good"], soak.stderr
    return report


def test_a_short_soak_sends_requests_to_every_model(report: dict[str, Any]) -> None:
    assert {name.split(",")[0] for name in report["requests"]["by"]} == {"identity", "multiply", "halves"}


def test_a_short_soak_does_harm(report: dict[str, Any]) -> None:
    assert sum(report["faults"].values()) > 0


@pytest.mark.parametrize("what", MUST_BE_ZERO)
def test_a_short_soak_finds_nothing_that_must_not_be(report: dict[str, Any], what: str) -> None:
    assert report["failures"][what] == 0


def test_a_result_with_one_wrong_byte_is_found() -> None:
    payload = MODELS["halves"].payload(Noise(1))
    result = MODELS["halves"].expected(payload, Said()).copy()
    assert is_right(result, MODELS["halves"].expected(payload, Said()))
    result.view(np.uint8)[-1] ^= 1
    assert not is_right(result, MODELS["halves"].expected(payload, Said()))


def test_a_result_of_another_shape_is_found() -> None:
    assert not is_right(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))


def test_a_view_that_changes_while_it_is_held_is_found() -> None:
    views = HeldViews(limit=2)
    changing, steady = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    views.hold(changing, 2)
    views.hold(steady, 2)
    assert views.pass_call() == 0
    changing[3] = 1
    assert views.pass_call() == 1
