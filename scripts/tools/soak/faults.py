"""What the soak does to its own processes, its own memory and its own server, at random."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from shm_backend_utils.cli.shared_memory import find_sealed_memory
from shm_backend_utils.memory import reaper

from .client.process import ClientProcess, Phase, Tally
from .machine import fill
from .report import MODEL_RELOADS, SERVER_RESTARTS, SMALL_TMPFS, TWO_USERS
from .server import ALLOWED_UID, DISALLOWED_UID, SoakServer

SACRIFICE: Final = "scripts.tools.soak.client.sacrifice"
VISITOR: Final = "scripts.tools.soak.client.visitor"
SACRIFICE_S: Final = 60.0
VISIT_S: Final = 60.0
AIM_S: Final = 5.0
DEAD_STUB_S: Final = 1.5


class Saboteur:
    """Deals faults from a shuffled deck, so that a run of any length gets them in the intended proportion.

    The first faults are those of which a short run, too, must have had one each.
    """

    def __init__(
        self,
        server: SoakServer,
        clients: list[ClientProcess],
        new_client: Callable[[], ClientProcess],
        chance: random.Random,
        tally: Tally,
        cannot: Mapping[str, str],
    ) -> None:
        self._server = server
        self._clients = clients  # changed in place: a client that is killed is replaced
        self._new_client = new_client
        self._chance = chance
        self._tally = tally
        # when a client was killed in the middle of a stream over gRPC last, by ``time.monotonic()``
        self.last_kill_in_stream = -1e9
        visits = [] if TWO_USERS in cannot else [self._two_users]
        fills = [] if SMALL_TMPFS in cannot else [self._fill_shared_memory]
        first = [self._kill_client, self._reload_model, self._kill_server, *visits, *fills]
        self._deck: list[Callable[[], None]] = chance.sample(first, len(first))
        self._faults: list[Callable[[], None]] = [
            *[self._kill_client] * 6,
            *[self._kill_stub] * 2,
            *[self._reload_model] * 3,
            lambda: self._truncate("truncate between requests"),
            lambda: self._truncate("truncate in flight"),
            lambda: self._truncate("truncate everything"),
            lambda: self._spoil_sealed_memory("punch holes"),
            lambda: self._spoil_sealed_memory("die before handing over"),
            lambda: self._spoil_sealed_memory("die after handing over"),
            *visits,
            *fills,
            self._kill_server,
        ]

    def strike(self) -> None:
        """Do the next fault."""
        if not self._deck:
            self._deck = self._chance.sample(self._faults, len(self._faults))
        self._deck.pop()()

    def heal(self) -> None:
        """Bring every model's processes back. Triton 2.51 never starts a dead one again by itself."""
        for model in dict.fromkeys(self._server.missing_stubs()):
            if not self._server.reload(model):
                self._server.restart()
                self._tally.add("faults", "server killed, because a dead model could not be loaded anew")
                return
            self._tally.add("faults", "model reloaded, because its process had died")

    def _kill_client(self) -> None:
        index = self._chance.randrange(len(self._clients))
        client = self._clients[index]
        wanted = self._chance.choice((Phase.WRITING, Phase.IN_FLIGHT, Phase.READING, Phase.STREAMING))
        _wait_until(lambda: client.phase == wanted, step_s=0.0001)
        phase = client.phase  # it may be elsewhere by the time that the signal arrives: nobody can aim better
        client.kill()
        if phase == Phase.STREAMING:
            self.last_kill_in_stream = time.monotonic()
        self._tally.add("faults", f"client killed, {phase.name.lower().replace('_', ' ')}")
        self._clients[index] = self._new_client()

    def _kill_stub(self) -> None:
        model = self._chance.choice(self._server.models)
        stubs = self._server.stubs(model)
        executing = model == "halves" and _wait_until(lambda: _is_executing(stubs), step_s=0.001)
        for pid in self._server.stubs(model):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tally.add("faults", f"model killed, {'executing' if executing else model}")
        time.sleep(DEAD_STUB_S)  # clients are to meet a model without a process
        self.heal()

    def _reload_model(self) -> None:
        model = self._chance.choice(self._server.models)
        if self._server.reload(model):
            self._tally.add("faults", f"model reloaded, {model}")
            self._tally.add("done", MODEL_RELOADS)
        else:
            self._tally.add("faults", "model did not come back from a reload")
            self._server.restart()

    def _kill_server(self) -> None:
        self._server.restart()
        self._tally.add("faults", "server killed")
        self._tally.add("done", SERVER_RESTARTS)

    def _truncate(self, deed: str) -> None:
        self._tally.add("faults", f"region truncated, {deed.removeprefix('truncate ')}")
        self._sacrifice(deed)
        time.sleep(DEAD_STUB_S)
        self.heal()

    def _spoil_sealed_memory(self, deed: str) -> None:
        self._tally.add("faults", f"sealed memory, {deed}")
        self._sacrifice(deed)

    def _fill_shared_memory(self) -> None:
        filler = fill("soak-filler")
        try:
            self._tally.add("faults", "shared memory full")
            self._sacrifice("ask for memory")
        finally:
            filler.unlink()
        self._tally.add("done", SMALL_TMPFS)

    def _two_users(self) -> None:
        """Let two other users call a model that takes the memory of one of them."""
        self._tally.add("faults", "other users come")
        allowed, disallowed = self._visit(ALLOWED_UID), self._visit(DISALLOWED_UID)
        self._tally.add("wrong bytes", "an answer to an allowed user", allowed.get("wrong", 0))
        answered = disallowed.get("right", 0) + disallowed.get("wrong", 0)
        self._tally.add("wrong bytes", "an answer to a user who is not allowed", answered)
        self._tally.add("outcomes", "allowed user: answered rightly", allowed.get("right", 0))
        self._tally.add("outcomes", "allowed user: refused", allowed.get("refused", 0))
        self._tally.add("outcomes", "user who is not allowed: refused", disallowed.get("refused", 0))
        if allowed.get("right") and disallowed.get("refused"):
            self._tally.add("done", TWO_USERS)

    def _visit(self, uid: int) -> dict[str, int]:
        """Return what became of another user's requests."""
        urls = [self._server.grpc_url, self._server.http_url]
        seed = self._chance.getrandbits(32)
        outcome, status = _run([sys.executable, "-m", VISITOR, str(uid), str(seed), *urls], VISIT_S)
        if status != 0:
            self._tally.add("outcomes", f"another user's client: {outcome or status}")
            return {}
        visit = Tally()
        visit.merge(outcome)
        for name, count in visit.group("errors").items():
            self._tally.add("outcomes", f"another user's client: {name}", count)
        self._tally.add("requests", "another user's client", visit.total("visit"))
        return visit.group("visit")

    def _sacrifice(self, deed: str) -> None:
        outcome, status = _run([sys.executable, "-m", SACRIFICE, deed, self._server.grpc_url], SACRIFICE_S)
        self._tally.add("outcomes", f"{deed}: {outcome or status}")


def _run(command: list[str], timeout_s: float) -> tuple[str, int]:
    """Run a program; return what it printed, or what became of it, and its exit status."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        outcome, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "hung", process.returncode
    if process.returncode < 0:
        return signal.Signals(-process.returncode).name, process.returncode
    return outcome.strip(), process.returncode


def _is_executing(stubs: list[int]) -> bool:
    """Return whether some slot stays in use for longer than a model takes that does not sleep."""
    before = _in_use(stubs)
    time.sleep(0.004)
    return bool(before & _in_use(stubs))


def _in_use(stubs: list[int]) -> set[str]:
    """Return the regions in which a model executes, of those of ``/dev/shm`` and of the sealed ones that it has."""
    sealed = {str(memory.inode) for memory in find_sealed_memory(stubs).found if memory.slots_in_use}
    return sealed | {report.key for report in reaper.scan() if report.slots_in_use}


def _wait_until(is_so: Callable[[], bool], step_s: float) -> bool:
    deadline = time.monotonic() + AIM_S
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(step_s)
    return so
