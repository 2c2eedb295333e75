"""Honest clients, first alone and then beside hostile ones that take turns; who died, and what it cost the honest."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from shm_backend_utils.errors import MachineError

from ..client.process import Tally
from ..report import TWO_USERS, impossible
from ..server import SoakServer
from .attacker import READY
from .attacks import ATTACKS, HONEST, Kind

MOST_RATIO: Final = 3.0
"""How much longer than alone the slowest of a hundred honest requests may take."""

ATTACKER: Final = "scripts.tools.soak.hostile.attacker"
HONEST_COUNT: Final = 3
SHARE_ALONE: Final = 0.25
TURN_S: Final = 3.0
END_S: Final = 60.0


class Answer(NamedTuple):
    """One honest request."""

    kind: str
    began: float
    took_s: float
    error: str


class Turn(NamedTuple):
    """A time in which one attacker was at work, until what died of it was brought back."""

    name: str
    began: float
    ended: float
    died: tuple[str, ...]
    may_kill: bool = False


class Figures(NamedTuple):
    """Of the honest requests that began in some turns. Times are of those that were answered rightly."""

    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        """Work them out; of no request, all is 0."""
        times = [answer.took_s for answer in answers if not answer.error]
        took = np.array(times or [0.0]) * 1e3
        middle, slow = np.percentile(took, [50, 99])
        return cls(len(answers), len(answers) - len(times), float(middle), float(slow), float(took.max()))


@dataclass(frozen=True)
class HostileReport:
    """What was found."""

    seed: int
    seconds: float
    alone: Turn
    turns: list[Turn]
    answers: list[Answer]
    words: Mapping[str, Counter[str]]  # how the server answered each attacker

    def figures(self, name: str, kind: str = "request") -> Figures:
        """Return those of one attack, or alone."""
        turns = [turn for turn in (self.alone, *self.turns) if turn.name == name]
        return Figures.of(self._within(turns, kind))

    @property
    def all_attacks(self) -> Figures:
        """Those of all attacks, but of those that may kill."""
        return Figures.of(self._within([turn for turn in self.turns if not turn.may_kill], "request"))

    @property
    def ratio(self) -> float:
        """The honest clients' p99 beside the hostile ones, over theirs alone."""
        return self.all_attacks.p99_ms / max(self.figures("alone").p99_ms, 1e-6)

    @property
    def deaths(self) -> dict[str, int]:
        """What died, by the attack."""
        return dict(Counter(turn.name for turn in self.turns for _ in turn.died))

    @property
    def failures(self) -> dict[str, int]:
        """What must be zero."""
        may_kill = {turn.name for turn in self.turns if turn.may_kill}
        return {
            "honest requests that failed": self.all_attacks.failed,
            "deaths": sum(count for name, count in self.deaths.items() if name not in may_kill),
            f"p99 above {MOST_RATIO:g} times that alone": int(self.ratio > MOST_RATIO),
        }

    @property
    def is_good(self) -> bool:
        """Whether nothing was found that must not be."""
        return not any(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the whole report."""
        names = ["alone", *self.words]
        errors = Counter(
            (turn.name, answer.error)
            for turn in self.turns
            for answer in self.answers
            if answer.error and turn.began <= answer.began < turn.ended
        )
        return {
            "good": self.is_good,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
            "ratio": round(self.ratio, 2),
            "all_attacks": self.all_attacks._asdict(),
            "requests": {name: self.figures(name)._asdict() for name in names},
            "streams": {name: self.figures(name, "stream")._asdict() for name in names},
            "deaths": self.deaths,
            "pauses_s": {kind.name: kind.pause_s for kind in ATTACKS if kind.name in self.words},
            "attackers_were_answered": {name: dict(words.most_common()) for name, words in self.words.items()},
            "errors": {f"{name}: {error}": count for (name, error), count in errors.most_common()},
        }

    def show(self, console: Console) -> None:
        """Print the tables."""
        report = self.as_json()
        title = f"honest clients beside hostile ones: {self.seconds:.0f} s, seed {self.seed}"
        table = Table(
            "attack", "requests", "failed", "p50 ms", "p99 ms", "worst ms", "streams p99", "died", title=title
        )
        for name in report["requests"]:
            self._row(table, name, self.figures(name), f"{self.figures(name, 'stream').p99_ms:.0f}", name)
        self._row(table, "all that must not kill", self.all_attacks, "", "")
        console.print(table)
        console.print(f"p99 beside hostile clients, over p99 alone: {self.ratio:.2f}, at most {MOST_RATIO:g}")
        for name, words in report["attackers_were_answered"].items():
            console.print(f"{name}: {', '.join(f'{count} × {word}' for word, count in words.items()) or 'nothing'}")
        for error, count in report["errors"].items():
            console.print(f"{count} × {error}")
        for name, count in self.failures.items():
            console.print(f"[{'red' if count else 'green'}]{name}: {count}[/]")

    def _row(self, table: Table, name: str, found: Figures, streams: str, attack: str) -> None:
        times = [f"{each:.1f}" for each in (found.p50_ms, found.p99_ms, found.worst_ms)]
        table.add_row(name, str(found.requests), str(found.failed), *times, streams, str(self.deaths.get(attack, 0)))

    def _within(self, turns: Sequence[Turn], kind: str) -> list[Answer]:
        return [
            answer
            for answer in self.answers
            if answer.kind == kind and any(turn.began <= answer.began < turn.ended for turn in turns)
        ]


class Program(NamedTuple):
    """A process that is spoken to by lines."""

    process: subprocess.Popen[str]
    sink: IO[str]
    source: IO[str]

    @classmethod
    def start(cls, module: str, *arguments: str) -> Program:
        """Start a module of this package."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    def say(self, word: str) -> None:
        """Send it a line."""
        self.sink.write(f"{word}\n")
        self.sink.flush()

    def end(self) -> None:
        """Close its standard input, and wait; one that does not end is killed."""
        self.sink.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _wait_for(program: Program, name: str) -> None:
    if program.source.readline().strip() != READY:
        raise MachineError(f"{name} did not start")


class Assault:
    """One run."""

    def __init__(self, seed: int, kinds: list[Kind], has_private_shm: bool, folder: Path) -> None:
        self._seed = seed
        self._cannot = impossible(has_private_shm)
        self._kinds = [kind for kind in kinds if kind.uid is None or TWO_USERS not in self._cannot]
        self._chance = random.Random(seed)
        self._server = SoakServer(folder, Tally())
        self._answers: list[Answer] = []
        self._turns: list[Turn] = []
        self._words: dict[str, Counter[str]] = {kind.name: Counter() for kind in self._kinds}

    def run(self, seconds: float, on_tick: Callable[[float, str], None]) -> HostileReport:
        """Measure the honest clients alone, then beside each attack in turn, over and over."""
        with ExitStack() as at_end:
            at_end.callback(self._server.kill)
            attackers = {kind.name: self._start(kind, at_end) for kind in self._kinds}
            self._start_honest(at_end)
            began = time.monotonic()
            alone = Turn("alone", began, began + SHARE_ALONE * seconds, ())
            while (elapsed := time.monotonic() - began) < SHARE_ALONE * seconds:
                on_tick(elapsed, "the honest clients alone")
                time.sleep(0.1)
            waiting: list[Kind] = []
            while (elapsed := time.monotonic() - began) < seconds:
                waiting = waiting or self._chance.sample(self._kinds, len(self._kinds))
                kind = waiting.pop()
                on_tick(elapsed, kind.name)
                self._take_turn(kind, attackers[kind.name])
        return HostileReport(self._seed, time.monotonic() - began, alone, self._turns, self._answers, self._words)

    def _start(self, kind: Kind, at_end: ExitStack) -> Program:
        seed = str(self._chance.getrandbits(32))
        program = Program.start(ATTACKER, seed, kind.name, self._server.grpc_url)
        at_end.callback(program.end)
        _wait_for(program, f"the attacker {kind.name!r}")
        return program

    def _start_honest(self, at_end: ExitStack) -> None:
        urls = [self._server.grpc_url, self._server.http_url]
        programs = []
        for number in range(HONEST_COUNT):
            seed = str(self._chance.getrandbits(32))
            programs.append(Program.start(HONEST, seed, urls[number % len(urls)]))
            at_end.callback(programs[-1].end)
        for program in programs:
            _wait_for(program, "an honest client")
        for program in programs:
            listener = threading.Thread(target=self._listen, args=(program.source,))
            listener.start()
            at_end.callback(listener.join)
            at_end.callback(program.end)

    def _listen(self, source: IO[str]) -> None:
        for line in source:
            self._answers += [Answer(*each) for each in json.loads(line)]

    def _take_turn(self, kind: Kind, attacker: Program) -> None:
        """Let one attacker be at work; bring back what died of it."""
        began = time.monotonic()
        attacker.say("go")
        time.sleep(TURN_S)
        attacker.say("stop")
        answers = json.loads(attacker.source.readline())
        self._words[kind.name] = Counter(answers)
        if not self._server.is_running:
            died = ["the server"]
            self._server.restart()
        else:
            died = self._server.missing_stubs()
            if not all(self._server.reload(model) for model in dict.fromkeys(died)):
                self._server.restart()
        self._turns.append(Turn(kind.name, began, time.monotonic(), tuple(died), kind.kills))
