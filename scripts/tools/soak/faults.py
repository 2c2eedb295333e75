"""What the soak does to its own processes and its own memory, at random."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from shm_backend_utils.memory import reaper

from .client.board import Phase
from .client.process import ClientProcess
from .client.tally import Tally
from .machine import fill
from .server import SoakServer

__all__ = ["Saboteur"]

SACRIFICE: Final = "scripts.tools.soak.client.sacrifice"
SACRIFICE_S: Final = 60.0
AIM_S: Final = 5.0
DEAD_STUB_S: Final = 1.5
HALVES_INSTANCES: Final = 2


class Saboteur:
    """Deals faults from a shuffled deck, so that a run of any length gets them in the intended proportion.

    Parameters
    ----------
    clients : list of ClientProcess
        Changed in place: a client that is killed is replaced.
    may_fill : bool
        Whether /dev/shm is the soak's own, so that nobody else suffers when it is full.
    """

    def __init__(
        self,
        server: SoakServer,
        clients: list[ClientProcess],
        new_client: Callable[[], ClientProcess],
        chance: random.Random,
        tally: Tally,
        *,
        may_fill: bool,
    ) -> None:
        self._server = server
        self._clients = clients
        self._new_client = new_client
        self._chance = chance
        self._tally = tally
        self._deck: list[Callable[[], None]] = []
        self._faults: list[Callable[[], None]] = [
            *[self._kill_client] * 5,
            *[self._kill_stub] * 2,
            lambda: self._truncate("truncate between requests"),
            lambda: self._truncate("truncate in flight"),
            lambda: self._truncate("truncate everything"),
            *[self._fill_shared_memory] * may_fill,
            self._kill_server,
        ]

    def strike(self) -> None:
        """Do the next fault."""
        if not self._deck:
            self._deck = self._chance.sample(self._faults, len(self._faults))
        self._deck.pop()()

    def _kill_client(self) -> None:
        index = self._chance.randrange(len(self._clients))
        client = self._clients[index]
        wanted = self._chance.choice((Phase.WRITING, Phase.IN_FLIGHT, Phase.READING))
        _wait_until(lambda: client.phase == wanted, step_s=0.0001)
        phase = client.phase  # it may be elsewhere by the time that the signal arrives: nobody can aim better
        client.kill()
        self._tally.add("faults", f"client killed, {phase.name.lower().replace('_', ' ')}")
        self._clients[index] = self._new_client()

    def _kill_stub(self) -> None:
        executing = _wait_until(_is_model_executing, step_s=0.001)
        for pid in self._server.stubs("halves"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tally.add("faults", f"stub killed, {'executing' if executing else 'idle'}")
        self._bring_stubs_back()

    def _kill_server(self) -> None:
        self._server.restart()
        self._tally.add("faults", "server killed")

    def _truncate(self, deed: str) -> None:
        self._tally.add("faults", f"region truncated, {deed.removeprefix('truncate ')}")
        self._sacrifice(deed)
        self._bring_stubs_back()

    def _bring_stubs_back(self) -> None:
        """Let the clients meet a model without a process for a while. Triton 2.51 never starts a dead stub again."""
        if len(self._server.stubs("halves")) < HALVES_INSTANCES:
            time.sleep(DEAD_STUB_S)
            self._server.restart()
            self._tally.add("faults", "server killed, because a stub had died")

    def _fill_shared_memory(self) -> None:
        filler = fill("soak-filler")
        try:
            self._tally.add("faults", "shared memory full")
            self._sacrifice("ask for memory")
        finally:
            filler.unlink()

    def _sacrifice(self, deed: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", SACRIFICE, deed, self._server.grpc_url], stdout=subprocess.PIPE, text=True
        )
        try:
            outcome, _ = process.communicate(timeout=SACRIFICE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            outcome, _ = process.communicate()
            outcome = "hung"
        if process.returncode < 0:
            outcome = signal.Signals(-process.returncode).name
        self._tally.add("outcomes", f"{deed}: {outcome.strip() or process.returncode}")


def _is_model_executing() -> bool:
    """Return whether some slot stays in use for longer than a model takes that does not sleep."""
    before = _slots_in_use()
    time.sleep(0.004)
    return bool(before & _slots_in_use())


def _slots_in_use() -> set[str]:
    return {report.key for report in reaper.scan() if report.slots_in_use}


def _wait_until(is_so: Callable[[], bool], step_s: float) -> bool:
    deadline = time.monotonic() + AIM_S
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(step_s)
    return so
