"""Honest clients, first alone and then beside hostile ones that take turns; who died, and what it cost the honest."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final, NamedTuple

from shm_backend_utils.errors import MachineError

from ..client.tally import Tally
from ..coverage import TWO_USERS, impossible
from ..server import SoakServer
from .attacker import READY
from .attacks import Kind
from .floods import HONEST
from .report import Answer, HostileReport, Turn

__all__ = ["Assault"]

ATTACKER: Final = "scripts.tools.soak.hostile.attacker"
HONEST_COUNT: Final = 3
SHARE_ALONE: Final = 0.25
TURN_S: Final = 3.0
END_S: Final = 60.0


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
        program = Program.start(ATTACKER, "--seed", seed, kind.name, self._server.grpc_url)
        at_end.callback(program.end)
        _wait_for(program, f"the attacker {kind.name!r}")
        return program

    def _start_honest(self, at_end: ExitStack) -> None:
        urls = [self._server.grpc_url, self._server.http_url]
        programs = []
        for number in range(HONEST_COUNT):
            seed = str(self._chance.getrandbits(32))
            programs.append(Program.start(HONEST, "--seed", seed, urls[number % len(urls)]))
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
