"""One soak: keeps clients sending and faults coming, and looks at last what is left that nobody needs."""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.shared_file import DEV_SHM

from .client.process import ClientProcess, Tally
from .client.workloads.calls import ATTACHED_PREFIX
from .faults import Saboteur
from .machine import Growth
from .report import Leaks, SoakReport, impossible
from .server import SoakServer

HANG_S: Final = 45.0
SWEEP_S: Final = 12.0
SHORTEST_PAUSE_S: Final = 0.2
TRITONS_OWN_S: Final = 3.0
"""For how long after a client was killed in a stream a crash of the server is one that Triton 2.51 is known for."""
_DYING_S: Final = 1.0
"""So long a server may live on that crashes, when its models' processes have gone already."""

_FRAME: Final = re.compile(r"^ *\d+# .* in (\S+)$", re.MULTILINE)
_NEITHER: Final = ("libc.so", "libstdc++.so", "libpthread.so")


def crashed_in_frontends(log: str) -> bool:
    """Return whether a server crashed in its own gRPC or HTTP frontend, as before 24.12 of calls that are cancelled.

    That is issue 7368 of triton-inference-server/server. No backend, and so no memory of this library, is in the trace.
    """
    _, _, trace = log.rpartition("Signal (11) received.")
    files = [file for file in _FRAME.findall(trace) if not any(each in file for each in _NEITHER)]
    return bool(files) and all(file.endswith("/bin/tritonserver") for file in files)


class Soak:
    """One run."""

    def __init__(self, seed: int, client_count: int, has_private_shm: bool, folder: Path) -> None:
        self._seed = seed
        self._client_count = client_count
        self._cannot = impossible(has_private_shm)
        self._chance = random.Random(seed)
        self._tally = Tally()
        self._made: list[ClientProcess] = []
        self._hangs = 0
        self._growth = Growth()
        self._client_failures = 0
        self._server = SoakServer(folder, self._tally)
        self._clients: list[ClientProcess] = []

    def run(self, seconds: float, longest_pause_s: float, on_tick: Callable[[float, str], None]) -> SoakReport:
        """Soak, with at most such a pause between two faults; stop everything, look what is left, and report."""
        try:
            began = time.monotonic()
            self._clients += [self._new_client() for _ in range(self._client_count)]
            saboteur = Saboteur(
                self._server,
                self._clients,
                self._new_client,
                self._chance,
                self._tally,
                self._cannot,
            )
            while (elapsed := time.monotonic() - began) < seconds:
                pause_ends = min(elapsed + self._chance.uniform(SHORTEST_PAUSE_S, longest_pause_s), seconds)
                while (elapsed := time.monotonic() - began) < pause_ends:
                    on_tick(elapsed, self._summary())
                    self._look_after(saboteur)
                    time.sleep(0.1)
                if elapsed < seconds:
                    saboteur.strike()
            on_tick(seconds, "stopping the clients")
            unlucky = self._stop_clients()
            soaked = time.monotonic() - began
            on_tick(seconds, "waiting for the models to let go")
            reaper.reap()
            by_stubs = self._held_by_stubs_at_last()
            registrations = self._registrations_at_last()
        finally:
            for client in self._clients:
                if client.is_running:
                    client.kill()
            self._server.kill()
        leaks = Leaks(
            by_clients=self._tally.group("leaked by clients"),
            by_stubs=by_stubs,
            segments=self._segments_at_last(),
            server_segments=self._server.left_behind(),
            registrations=registrations,
            memory=self._growth.leaks(),
            descriptors_grown_to=max(map(int, self._tally.group("descriptors")), default=0),
        )
        return SoakReport(
            seed=self._seed,
            seconds=soaked,
            client_count=self._client_count,
            cannot=self._cannot,
            tally=self._tally,
            leaks=leaks,
            grown=self._growth.most,
            hangs=self._hangs,
            client_failures=self._client_failures,
            clients_without_a_result=unlucky,
        )

    def _new_client(self) -> ClientProcess:
        seed = self._chance.getrandbits(32)
        client = ClientProcess(self._server.grpc_url, self._server.http_url, seed, self._tally)
        self._made.append(client)
        return client

    def _look_after(self, saboteur: Saboteur) -> None:
        """Count and mend what must not have happened."""
        missing = self._server.missing_stubs() if self._server.is_running else []
        if missing:
            time.sleep(_DYING_S)
        if not self._server.is_running:
            log = self._server.log_tail()
            print(log, file=sys.stderr)
            is_tritons = time.monotonic() - saboteur.last_kill_in_stream < TRITONS_OWN_S or crashed_in_frontends(log)
            self._tally.add("deaths of Triton" if is_tritons else "deaths", "the server")
            self._server.restart()
        elif missing:
            print(self._server.log_tail(), file=sys.stderr)
            for model in missing:
                self._tally.add("deaths", f"a process of model {model}")
            saboteur.heal()
        with suppress(ClosedError):  # it has died just now
            self._growth.look("server", self._server.pid)
        for pid in self._server.stubs():
            self._growth.look("models", pid)
        for client in self._clients:
            self._growth.look("clients", client.pid)
        for index, client in enumerate(self._clients):
            if not client.is_running:
                self._client_failures += 1
                client.stop()
                self._clients[index] = self._new_client()
            elif client.idle_s() > HANG_S:
                self._hangs += 1
                client.kill(signal.SIGABRT)  # its faulthandler tells where it hangs
                self._clients[index] = self._new_client()

    def _stop_clients(self) -> int:
        """Stop every client; return how many of them have never seen a right result."""
        unlucky = 0
        for client in self._clients:
            deadline = time.monotonic() + HANG_S
            while client.is_running and not client.verified and time.monotonic() < deadline:
                time.sleep(0.1)  # it was started a moment ago
            unlucky += not client.verified
            self._client_failures += not client.stop()
        self._clients.clear()
        return unlucky

    def _held_by_stubs_at_last(self) -> list[str]:
        deadline = time.monotonic() + SWEEP_S
        while (held := self._server.held_by_stubs()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held

    def _segments_at_last(self) -> list[str]:
        """Return memory that nobody has removed. What plain tritonclient's users make is theirs to remove."""
        left = [path.name for client in self._made for path in DEV_SHM.glob(f"{KEY_PREFIX}{client.pid}-*")]
        for path in DEV_SHM.glob(f"{ATTACHED_PREFIX}*"):
            if self._was_killed(path.name):
                path.unlink()
            else:
                left.append(path.name)
        return left

    def _registrations_at_last(self) -> list[str]:
        """Return what of the package's is still registered, but for what clients had registered that were killed."""
        keys = [found.key.removeprefix("/") for found in self._server.registrations().values()]
        return [key for key in keys if key.startswith(KEY_PREFIX) and not self._was_killed(key)]

    def _was_killed(self, key: str) -> bool:
        return any(client.was_killed and f"-{client.pid}-" in key for client in self._made)

    def _summary(self) -> str:
        requests, faults = self._tally.total("requests"), self._tally.total("faults")
        wrong, errors = self._tally.total("wrong bytes"), self._tally.total("errors")
        return f"{requests:,} requests, {faults} faults, {errors} errors, {wrong} wrong"
