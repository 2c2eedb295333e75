"""Faults that the soak injects at random into its own processes, memory and server."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.memory.shared_file import DEV_SHM, free_bytes

from .client.process import CONNECTIONS, AttackerProcess, ClientProcess, Phase
from .client.tally import FAILED_CLIENTS, MUST_BE_ZERO, WRONG, Tally
from .hostile.attacks import DISALLOWED_UID
from .report import MODEL_RELOADS, SERVER_RESTARTS, SMALL_TMPFS, TWO_USERS
from .server import ALLOWED_UID, GUESTS, SoakServer

TRUNCATING: Final = "truncating, a user who is allowed"
ATTACKS: Final = (TRUNCATING, "sparse files", "locking its own slots", "garbage tables")
"""Those that leave the server as it is; truncation ends a model's instance."""


class Saboteur:
    """Deals faults from a shuffled deck; of the first ones a short run, too, must have had one each."""

    def __init__(self, server: SoakServer, chance: random.Random, tally: Tally, cannot: Mapping[str, str]) -> None:
        self._server = server
        self._chance = chance
        self._tally = tally
        self.made: list[ClientProcess] = []  # all clients
        self.clients: list[ClientProcess] = []  # those that run; one that is killed is replaced
        # when a client was killed in the middle of a stream over gRPC last, by ``time.monotonic()``
        self.last_kill_in_stream = -1e9
        visits = [] if TWO_USERS in cannot else [self._two_users]
        fills = [] if SMALL_TMPFS in cannot else [self._fill_shared_memory]
        first = [self._kill_client, self._reload_model, self._kill_server, *visits, *fills]
        self._deck: list[Callable[[], None]] = chance.sample(first, len(first))
        self._faults: list[Callable[[], None]] = [
            *first,
            *[self._kill_client] * 5,
            *[self._kill_stub] * 2,
            *[self._reload_model] * 2,
            *[partial(self._attack, name) for name in ATTACKS],
        ]

    def new_client(self) -> ClientProcess:
        self.made.append(ClientProcess(self._server.urls, self._chance.getrandbits(32), self._tally))
        return self.made[-1]

    def strike(self) -> None:
        if not self._deck:
            self._deck = self._chance.sample(self._faults, len(self._faults))
        self._deck.pop()()

    def _kill_client(self) -> None:
        index = self._chance.randrange(len(self.clients))
        client = self.clients[index]
        wanted = self._chance.choice((Phase.WRITING, Phase.IN_FLIGHT, Phase.READING, Phase.STREAMING))
        deadline = time.monotonic() + 5.0
        while client.phase != wanted and time.monotonic() < deadline:
            time.sleep(0.0001)
        phase = client.phase  # it may be elsewhere by the time that the signal arrives: nobody can aim better
        client.kill()
        if phase == Phase.STREAMING:
            self.last_kill_in_stream = time.monotonic()
        self._tally.add("faults", f"client killed, {phase.name.lower().replace('_', ' ')}")
        self.clients[index] = self.new_client()

    def _kill_stub(self) -> None:
        model = self._chance.choice(self._server.models)
        for pid in self._server.stubs(model):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._tally.add("faults", f"model killed, {model}")
        self._heal()

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

    def _fill_shared_memory(self) -> None:
        """Take all space of /dev/shm with one file, while clients ask for memory."""
        path = DEV_SHM / "soak-filler"
        deadline = time.monotonic() + 1.0
        with path.open("xb") as file:
            try:
                while time.monotonic() < deadline:
                    with contextlib.suppress(OSError):  # another process was faster: less is left now
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, int(free_bytes()) or 1)
                    time.sleep(0.01)
            finally:
                path.unlink()
        self._tally.add("faults", "shared memory full")
        self._tally.add("done", SMALL_TMPFS)

    def _two_users(self) -> None:
        """Let two other users call a model that takes the memory of one of them."""
        self._tally.add("faults", "other users come")
        allowed, _ = self._visit("allowed user", ALLOWED_UID)
        answered, refused = self._visit("user who is not allowed", DISALLOWED_UID)
        self._tally.add(WRONG, "an answer to a user who is not allowed", answered)
        if allowed and refused:
            self._tally.add("done", TWO_USERS)

    def _visit(self, name: str, uid: int) -> tuple[int, int]:
        """Return how many of another user's requests were answered, and how many refused."""
        visit = Tally()
        visitor = ClientProcess(self._server.urls, self._chance.getrandbits(32), visit, [GUESTS], uid)
        visitor.wait_for_results(CONNECTIONS)
        time.sleep(1.5)
        if not visitor.end():
            self._tally.add(FAILED_CLIENTS, name)
        answered, errors = visit.total("requests"), visit.groups().get("errors", {})
        self._tally.add("requests", name, answered)
        for outcome, count in {"answered": answered, **errors}.items():
            self._tally.add("outcomes", f"{name}: {outcome}", count)
        for group in MUST_BE_ZERO:
            self._tally.add(group, name, visit.total(group))
        refusals = (MemoryRefusedError.__name__, PathUnavailableError.__name__)
        return answered, sum(count for error, count in errors.items() if error.startswith(refusals))

    def _attack(self, name: str) -> None:
        """Let a hostile client work for a moment, and restart what may die of it."""
        self._tally.add("faults", f"attack: {name}")
        attacker = AttackerProcess(name, self._chance.getrandbits(32), self._server.urls[0])
        answers = attacker.take_turn(1.0) if attacker.hear() else {}  # it ends if the server has just died
        attacker.end()
        for answer, count in answers.items():
            self._tally.add("outcomes", f"{name}: {answer}", count)
        if name == TRUNCATING:
            self._heal()

    def _heal(self) -> None:
        if self._server.is_running and self._server.missing_stubs():
            time.sleep(1.5)  # clients are to meet a model without a process
            self._server.heal()
