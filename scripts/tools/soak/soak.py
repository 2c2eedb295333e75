"""One soak: keeps clients sending and faults coming, and looks at last what is left that nobody needs."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shm_backend_utils.memory import reaper

from .client.process import ClientProcess
from .client.tally import Tally
from .faults import Saboteur
from .machine import SHM
from .report import Leaks, SoakReport
from .server import SoakServer

__all__ = ["Soak"]

HANG_S: Final = 60.0
SWEEP_S: Final = 12.0
LONGEST_PAUSE_S: Final = 1.5


class Soak:
    """One run."""

    def __init__(self, seed: int, client_count: int, has_private_shm: bool, folder: Path) -> None:
        self._seed = seed
        self._client_count = client_count
        self._has_private_shm = has_private_shm
        self._chance = random.Random(seed)
        self._tally = Tally()
        self._pids: list[int] = []
        self._hangs = 0
        self._server_deaths = 0
        self._client_failures = 0
        self._server = SoakServer(folder, self._chance, self._tally)
        self._clients: list[ClientProcess] = []

    def run(self, seconds: float, on_tick: Callable[[float, str], None]) -> SoakReport:
        """Soak, stop everything, look what is left, and report."""
        try:
            began = time.monotonic()
            self._clients += [self._new_client() for _ in range(self._client_count)]
            saboteur = Saboteur(
                self._server,
                self._clients,
                self._new_client,
                self._chance,
                self._tally,
                may_fill=self._has_private_shm,
            )
            while (elapsed := time.monotonic() - began) < seconds:
                pause_ends = min(elapsed + self._chance.uniform(0.2, LONGEST_PAUSE_S), seconds)
                while (elapsed := time.monotonic() - began) < pause_ends:
                    on_tick(elapsed, self._summary())
                    self._look_after()
                    time.sleep(0.1)
                if elapsed < seconds:
                    saboteur.strike()
            on_tick(seconds, "stopping the clients")
            unlucky = self._stop_clients()
            soaked = time.monotonic() - began
            on_tick(seconds, "waiting for the models to let go")
            reaper.reap()
            by_stubs = self._held_by_stubs_at_last()
        finally:
            for client in self._clients:
                if client.is_running:
                    client.kill()
            self._server.kill()
        leaks = Leaks(
            by_clients=self._tally.group("leaked by clients"),
            by_stubs=by_stubs,
            segments=[path.name for pid in self._pids for path in SHM.glob(f"shmbu-{pid}-*")],
            server_segments=self._server.left_behind(),
            descriptors_grown_to=max(map(int, self._tally.group("descriptors")), default=0),
        )
        return SoakReport(
            seed=self._seed,
            seconds=soaked,
            client_count=self._client_count,
            has_private_shm=self._has_private_shm,
            tally=self._tally,
            leaks=leaks,
            server_deaths=self._server_deaths,
            hangs=self._hangs,
            client_failures=self._client_failures,
            clients_without_a_result=unlucky,
        )

    def _new_client(self) -> ClientProcess:
        seed = self._chance.getrandbits(32)
        client = ClientProcess(self._server.grpc_url, self._server.http_url, seed, self._tally)
        self._pids.append(client.pid)
        return client

    def _look_after(self) -> None:
        """Count and mend what must not have happened."""
        if not self._server.is_running:
            print(self._server.log_tail(), file=sys.stderr)
            self._server_deaths += 1
            self._server.restart()
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

    def _summary(self) -> str:
        requests, faults = self._tally.total("requests"), self._tally.total("faults")
        wrong, errors = self._tally.total("wrong bytes"), self._tally.total("errors")
        return f"{requests:,} requests, {faults} faults, {errors} errors, {wrong} wrong"
