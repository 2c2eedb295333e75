"""Send checked requests through a real server for a while, and break everything that can break meanwhile.

The exit status is 1 if a byte was wrong, something leaked or hung, or the server died of what it should survive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from signals import Interrupted, raise_on_signals
from soak_clients import ClientProcess
from soak_faults import Saboteur
from soak_machine import SHM, take_private_shm
from soak_report import Leaks, SoakReport
from soak_server import SoakServer
from soak_tally import Tally

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory import reaper

SHM_BYTES: Final = 512 << 20
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


@contextlib.contextmanager
def shown(seconds: float) -> Iterator[Callable[[float, str], None]]:
    """Show progress on standard error."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting the server", total=seconds)
        yield lambda elapsed, text: progress.update(task, completed=elapsed, description=text)


def positive(text: str) -> float:
    """Read a number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("expected more than 0")
    return number


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=positive, default=60.0, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--seed", type=int, metavar="N", help="of all that is left to chance; a new one if not given")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    raise_on_signals()
    has_private_shm = take_private_shm(SHM_BYTES)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shm-backend-utils-soak-") as folder,
            shown(arguments.seconds) as on_tick,
        ):
            report = Soak(seed, arguments.clients, has_private_shm, Path(folder)).run(arguments.seconds, on_tick)
    except MachineError as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.number
    report.show(Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
