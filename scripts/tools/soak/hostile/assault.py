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
from ..client.tally import DEATHS, MUST_BE_ZERO, Tally
from ..report import TWO_USERS, Report, impossible
from ..server import SoakServer
from .attacks import Kind

MOST_RATIO: Final = 3.0
"""How much longer than alone the slowest of a hundred honest requests may take."""

CLIENT_COUNT: Final = 3
CALLED: Final = ("identity", "halves", "rows")
SHARE_ALONE: Final = 0.25
TURN_S: Final = 3.0
ALONE: Final = "alone"
BESIDE: Final = "all that must not kill"


class Answer(NamedTuple):
    """One honest request."""

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


class Assault:
    """One run."""

    def __init__(self, seed: int, kinds: list[Kind], has_private_shm: bool, folder: Path) -> None:
        self._seed = seed
        cannot = impossible(has_private_shm)
        self._kinds = [kind for kind in kinds if kind.uid is None or TWO_USERS not in cannot]
        self._chance = random.Random(seed)
        self._tally = Tally()
        self._server = SoakServer(folder, self._tally)
        self._words: dict[str, Mapping[str, int]] = {kind.name: {} for kind in self._kinds}

    def run(self, seconds: float, on_tick: Callable[[float, str], None]) -> Report:
        """Measure the honest clients alone, then beside each attack in turn, over and over."""
        with self._server, ExitStack() as at_end:
            clients = [self._start_client(at_end) for _ in range(CLIENT_COUNT)]
            if not all(client.wait_for_results(CONNECTIONS) for client in clients):
                raise MachineError("an honest client did not start")
            attackers = {kind.name: self._start_attacker(kind, at_end) for kind in self._kinds}
            began = time.monotonic()
            on_tick(0, "the honest clients alone")
            time.sleep(SHARE_ALONE * seconds)
            turns = [Turn(ALONE, began, time.monotonic())]
            waiting: list[Kind] = []
            while (elapsed := time.monotonic() - began) < seconds:
                waiting = waiting or self._chance.sample(self._kinds, len(self._kinds))
                kind = waiting.pop()
                on_tick(elapsed, kind.name)
                turns.append(self._take_turn(kind, attackers[kind.name]))
        answers = [Answer(*answer) for client in clients for answer in client.answers]
        return hostile_report(self._seed, turns, answers, self._words, self._tally)

    def _start_attacker(self, kind: Kind, at_end: ExitStack) -> AttackerProcess:
        attacker = AttackerProcess(kind.name, self._chance.getrandbits(32), self._server.urls[0])
        at_end.callback(attacker.end)
        return attacker

    def _start_client(self, at_end: ExitStack) -> ClientProcess:
        client = ClientProcess(self._server.urls, self._chance.getrandbits(32), self._tally, CALLED)
        at_end.callback(client.end)
        return client

    def _take_turn(self, kind: Kind, attacker: AttackerProcess) -> Turn:
        """Let one attacker be at work; bring back what died of it."""
        began = time.monotonic()
        self._words[kind.name] = attacker.take_turn(TURN_S)
        died = self._server.heal()
        return Turn(kind.name, began, time.monotonic(), died, kind.kills)
