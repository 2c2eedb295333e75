"""Honest clients, first alone and then beside hostile ones that take turns; who died, and what it cost the honest."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from shm_backend_utils.errors import MachineError

from ..client.process import CONNECTIONS, AttackerProcess, ClientProcess
from ..client.tally import DEATHS, FAILED_CLIENTS, MUST_BE_ZERO, Tally
from ..report import TWO_USERS, Report, impossible
from ..server import SoakServer
from .attacks import Kind

MOST_RATIO: Final = 3.0
"""How much longer than alone the slowest of a hundred honest requests may take."""

ALONE: Final = "alone"
BESIDE: Final = "all that must not kill"


class Answer(NamedTuple):
    began: float
    took_s: float
    error: str  # empty if it was answered


class Turn(NamedTuple):
    """A time in which one attacker was at work, or none, until what died of it was brought back."""

    name: str
    began: float
    ended: float
    died: Sequence[str] = ()
    may_kill: bool = False


def hostile_report(
    seed: int, turns: Sequence[Turn], answers: Sequence[Answer], words: Mapping[str, Mapping[str, int]], tally: Tally
) -> Report:
    """Report how the honest clients fared in the first turn, alone, and in the others; ``words`` the attackers got."""
    alone, *others = turns
    harmless = [turn for turn in others if not turn.may_kill]
    by_name = {name: [turn for turn in turns if turn.name == name] for name in (ALONE, *words)}
    requests = {name: _figures(answers, found) for name, found in {**by_name, BESIDE: harmless}.items()}
    ratio = requests[BESIDE]["p99_ms"] / max(requests[ALONE]["p99_ms"], 1e-6)
    failures = {
        **{name: tally.total(name) for name in MUST_BE_ZERO},
        "honest requests that failed": int(requests[BESIDE]["failed"]),
        DEATHS: tally.total(DEATHS) + sum(len(turn.died) for turn in harmless),
        f"p99 above {MOST_RATIO:g} times that alone": int(ratio > MOST_RATIO),
    }
    failed = ((turn, answer.error) for turn in turns for answer in _within(answers, [turn]) if answer.error)
    sections: dict[str, Mapping[str, object]] = {
        "requests": requests,
        "p99 over that alone": {f"at most {MOST_RATIO:g}": ratio},
        "died": Counter(f"{turn.name}: {dead}" for turn in others for dead in turn.died),
        "attackers were answered": words,
        "errors": Counter(f"{turn.name}: {error}" for turn, error in failed),
    }
    return Report(seed, turns[-1].ended - alone.began, failures, sections)


def _figures(answers: Sequence[Answer], turns: Sequence[Turn]) -> dict[str, float]:
    """Return the figures of the honest requests that began in some turns; times are of those that were answered."""
    found = _within(answers, turns)
    times = [answer.took_s for answer in found if not answer.error]
    p50, p99, worst = map(float, np.percentile(np.array(times or [0.0]) * 1e3, [50, 99, 100]))
    failed = len(found) - len(times)
    return {"requests": len(found), "failed": failed, "p50_ms": p50, "p99_ms": p99, "worst_ms": worst}


def _within(answers: Sequence[Answer], turns: Sequence[Turn]) -> list[Answer]:
    return [answer for answer in answers if any(turn.began <= answer.began < turn.ended for turn in turns)]


def assault(
    seed: int,
    kinds: Sequence[Kind],
    has_private_shm: bool,
    folder: Path,
    seconds: float,
    on_tick: Callable[[float, str], None],
) -> Report:
    """Measure honest clients alone, then beside each attack in turn, over and over."""
    cannot, chance, tally = impossible(has_private_shm), random.Random(seed), Tally()
    names = {kind.name: kind for kind in kinds if kind.uid is None or TWO_USERS not in cannot}
    words: dict[str, Mapping[str, int]] = {name: {} for name in names}
    server = SoakServer(folder, tally)
    with server, ExitStack() as at_end:
        called = ("identity", "halves", "rows")
        clients = [ClientProcess(server.urls, chance.getrandbits(32), tally, called) for _ in range(3)]
        for client in clients:
            at_end.callback(client.end)
        if not all(client.wait_for_results(CONNECTIONS) for client in clients):
            raise MachineError("an honest client did not start")
        attackers = {name: AttackerProcess(name, chance.getrandbits(32), server.urls[0]) for name in names}
        for name, attacker in attackers.items():
            at_end.callback(attacker.end)
            if not attacker.hear():
                raise MachineError(f"the attacker {name!r} did not start")
        began = time.monotonic()
        on_tick(0, "the honest clients alone")
        time.sleep(seconds / 4)
        turns = [Turn(ALONE, began, time.monotonic())]
        waiting: list[str] = []
        while (now := time.monotonic()) < began + seconds:
            waiting = waiting or chance.sample(list(names), len(names))
            name = waiting.pop()
            on_tick(now - began, name)
            words[name] = attackers[name].take_turn(3.0)
            died = server.heal()  # which is part of the turn
            turns.append(Turn(name, now, time.monotonic(), died, names[name].kills))
    tally.add(FAILED_CLIENTS, "honest ones", sum(not client.end() for client in clients))
    answers = [Answer(*answer) for client in clients for answer in client.answers]
    return hostile_report(seed, turns, answers, words, tally)
