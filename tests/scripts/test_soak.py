"""``scripts/soak``, run for a few seconds as a user runs it, and whether its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.tools import ROOT
from scripts.tools.soak.client.models import HeldViews, Noise, Request, is_right
from scripts.tools.soak.client.tally import MUST_BE_ZERO, Tally
from scripts.tools.soak.hostile.assault import Answer, Turn, hostile_report
from scripts.tools.soak.report import Report, soak_report

pytestmark = pytest.mark.long

AT_ONCE = ("wrong bytes", "leaks", "deaths that were not injected", "hangs", "clients that failed to end")
MUST_BE_DONE = [
    *("ShmClient", "AsyncShmClient", "gRPC", "HTTP", "infer", "prepare", "submit", "split", "streams", "batches"),
    *("strings", "forward", "compat", "attach", "varying shapes", "parameters", "headers", "overflows", "forks"),
    *("small calls", "tiny switch intervals", "signals at points", "sealed memory", "memory in /dev/shm"),
    *("two users", "a small tmpfs", "server restarts", "model reloads"),
]


def run_soak(file: Path, *options: str) -> dict[str, Any]:
    soak = subprocess.run(
        [sys.executable, "-m", "scripts.tools.soak", *options, "--seed", "4", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    report: dict[str, Any] = json.loads(file.read_text())
    assert (soak.returncode == 0) == report["good"], soak.stderr
    return report


def found(seconds: float, done: Sequence[str], cannot: Sequence[str] = (), wrong: Sequence[str] = ()) -> Report:
    """Return the report of a soak that has done these things, and found nothing else."""
    tally = Tally()
    for group, words in (("done", done), *((group, ["something"]) for group in wrong)):
        for word in words:
            tally.add(group, word)
    return soak_report(1, seconds, tally, dict.fromkeys(cannot, "no reason"))


def test_a_short_soak_finds_nothing_that_must_not_be_and_names_everything_that_it_must_do(tmp_path: Path) -> None:
    report = run_soak(tmp_path / "report.json", "--seconds", "6", "--clients", "2")
    assert {what: report["failures"][what] for what in AT_ONCE} == dict.fromkeys(AT_ONCE, 0)
    assert list(report["done"]) == MUST_BE_DONE


def test_a_soak_of_a_minute_fails_if_it_has_left_something_out() -> None:
    assert found(60, MUST_BE_DONE).is_good
    for word in MUST_BE_DONE:
        others = [each for each in MUST_BE_DONE if each != word]
        assert not found(60, others).is_good
        assert found(59, others).is_good
        assert found(60, others, cannot=[word]).is_good


@pytest.mark.parametrize("group", MUST_BE_ZERO)
def test_a_soak_fails_by_each_thing_that_must_not_be(group: str) -> None:
    assert not found(60, MUST_BE_DONE, wrong=[group]).is_good
    assert not hostile([], [], wrong=[group]).is_good


def hostile(answers: Sequence[Answer], turns: Sequence[Turn], wrong: Sequence[str] = ()) -> Report:
    """Return a report of one second alone, and then these turns."""
    alone, tally = Answer(0.1, 0.001, ""), Tally()
    for group in wrong:
        tally.add(group, "something")
    return hostile_report(1, [Turn("alone", 0, 1, ()), *turns], [alone, *answers], {}, tally)


GARBAGE = Turn("garbage tables", 1, 3, ())
TURNS: dict[str, tuple[list[Answer], Turn, bool]] = {
    "held up a little": ([Answer(2.0, 0.003, "")], GARBAGE, True),
    "held up": ([Answer(2.0, 0.004, "")], GARBAGE, False),
    "refused": ([Answer(2.0, 0.001, "refused")], GARBAGE, False),
    "died": ([], GARBAGE._replace(died=("halves",)), False),
    "may die": ([Answer(2.0, 0.1, "dead")], Turn("truncating", 1, 3, ("halves",), may_kill=True), True),
}


@pytest.mark.parametrize("what", TURNS)
def test_honest_clients_must_not_be_held_up_refused_or_killed(what: str) -> None:
    answers, turn, is_good = TURNS[what]
    assert hostile(answers, [turn]).is_good == is_good


def test_a_short_run_beside_hostile_clients_measures_the_honest_ones(tmp_path: Path) -> None:
    report = run_soak(tmp_path / "hostile.json", "--hostile", "--seconds", "8")
    assert report["requests"]["alone"]["requests"] > 0
    assert report["requests"]["alone"]["failed"] == 0
    assert report["requests"]["all that must not kill"]["requests"] > 0
    assert sum(sum(words.values()) for words in report["attackers were answered"].values()) > 0


def test_a_result_with_one_wrong_byte_is_found() -> None:
    request = Request("halves", Noise(1).words())
    result = request.expected.copy()
    assert is_right(result, request.expected)
    result.view(np.uint8)[-1] ^= 1
    assert not is_right(result, request.expected)


def test_a_view_that_changes_while_it_is_held_is_found() -> None:
    views = HeldViews(limit=2)
    changing, steady = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    views.hold(changing, 2)
    views.hold(steady, 2)
    assert views.pass_calls() == 0
    changing[3] = 1
    assert views.pass_calls() == 1
