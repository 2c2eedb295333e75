"""Send checked requests through a real server for a while, and meanwhile break everything that can break.

The exit status is 1 if anything was wrong, leaked, hung, or died that was not killed, or if a run of a minute or more
left something out. Without root there are no requests of a second user, and /dev/shm, which is shared, is not filled.

With --hostile, honest clients are measured alone for a quarter of the time, and then beside hostile ones: the exit
status is 1 if they fail, if their p99 is more than 3 times what it was alone, or if anything dies that should survive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shm_backend_utils.cli.terminal import exit_status, positive, positive_float
from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.testing.faults.at_hand import take_private_shm

from ..processes import resident_bytes
from .client.process import ATTACHED_PREFIX
from .client.tally import DEATHS, FAILED_CLIENTS, HANGS, LEAKS, UNLUCKY_CLIENTS, WRONG, Tally
from .faults import Saboteur
from .hostile.assault import assault
from .hostile.attacks import ATTACKS
from .report import Report, impossible, soak_report
from .server import SoakServer


def crashed_in_frontends(log: str) -> bool:
    """Return whether a server crashed in its own frontend (issue 7368 of triton-inference-server/server)."""
    _, _, trace = log.rpartition("Signal (11) received.")
    files = re.findall(r"^ *\d+# .* in (\S+)$", trace, re.MULTILINE)[2:]  # behind the signal's handler, and its caller
    own = [file for file in files if not re.search(r"lib(c|stdc\+\+|pthread)\.so", file)]
    return bool(own) and own[0].endswith("/bin/tritonserver")


class Soak:
    def __init__(self, seed: int, client_count: int, has_private_shm: bool, folder: Path) -> None:
        self._seed = seed
        self._client_count = client_count
        self._cannot = impossible(has_private_shm)
        self._chance = random.Random(seed)
        self._tally = Tally()
        self._began: dict[int, float] = {}  # when a process was seen first
        self._warm: dict[int, int] = {}  # how much memory it had when it was warm
        self._grown: Counter[str] = Counter()  # the largest growth of a process of each kind, in bytes
        self._server = SoakServer(folder, self._tally)
        self._saboteur = Saboteur(self._server, self._chance, self._tally, self._cannot)
        self._clients = self._saboteur.clients

    def run(self, seconds: float, on_tick: Callable[[float, str], None]) -> Report:
        """Soak, stop everything, check for leaks, and report."""
        with self._server:
            try:
                began = time.monotonic()
                self._clients += [self._saboteur.new_client() for _ in range(self._client_count)]
                while (elapsed := time.monotonic() - began) < seconds:
                    pause_ends = min(elapsed + self._chance.uniform(0.2, 1.5), seconds)
                    while (elapsed := time.monotonic() - began) < pause_ends:
                        on_tick(elapsed, self._summary())
                        self._look_after()
                        time.sleep(0.1)
                    if elapsed < seconds:
                        self._saboteur.strike()
                on_tick(seconds, "stopping the clients")
                self._stop_clients()
                soaked = time.monotonic() - began
                on_tick(seconds, "waiting for the models to let go")
                self._count_leaks_at_server()
            finally:
                for client in self._clients:
                    client.kill()
        self._count_leaks()
        return soak_report(self._seed, soaked, self._tally, self._cannot)

    def _look_after(self) -> None:
        """Count deaths and hangs that must not happen, and restart what they ended."""
        if self._server.missing_stubs():
            time.sleep(1.0)  # a crashing server may run longer than its models' processes
            log = self._server.server.log_tail(60)
            print(log, file=sys.stderr)
            # A crash so soon after a client was killed in a stream is a known bug of Triton 2.51.
            died_in_stream = time.monotonic() - self._saboteur.last_kill_in_stream < 3.0
            for dead in self._server.heal():
                is_tritons = dead == "the server" and (died_in_stream or crashed_in_frontends(log))
                self._tally.add("deaths of Triton" if is_tritons else DEATHS, dead)
        with suppress(ClosedError):  # it has died just now
            self._look_at("server", self._server.server.pid)
        for pid in self._server.stubs():
            self._look_at("models", pid)
        for index, client in enumerate(self._clients):
            self._look_at("clients", client.pid)
            if not client.is_running:
                self._tally.add(FAILED_CLIENTS, "by themselves")
                client.end()
                self._clients[index] = self._saboteur.new_client()
            elif client.idle_s() > 45.0:
                self._tally.add(HANGS, "a client")
                client.kill(signal.SIGABRT)  # its faulthandler tells where it hangs
                self._clients[index] = self._saboteur.new_client()

    def _look_at(self, kind: str, pid: int) -> None:
        """Note how much a process has grown since it was warm."""
        now = time.monotonic()
        if now - self._began.setdefault(pid, now) > 20.0 and (resident := resident_bytes(pid)):
            self._grown[kind] = max(self._grown[kind], resident - self._warm.setdefault(pid, resident))

    def _stop_clients(self) -> None:
        """Stop every client after it has seen a right result: some were started a moment ago."""
        while self._clients:
            client = self._clients.pop()
            if not client.wait_for_results():
                self._tally.add(UNLUCKY_CLIENTS, "at the end")
            if not client.end():
                self._tally.add(FAILED_CLIENTS, "when they were told to")

    def _count_leaks_at_server(self) -> None:
        """Count clients' memory that models still hold in the end, or that the server still has registered."""
        reaper.reap()
        deadline = time.monotonic() + 12.0
        while (held := self._server.held_by_stubs()) and time.monotonic() < deadline:
            time.sleep(0.2)
        keys = [found.key.removeprefix("/") for found in fetch_registrations(self._server.urls[1]).values()]
        registered = [key for key in keys if key.startswith(KEY_PREFIX) and not self._was_killed(key)]
        for leak in [*held, *(f"{key} is registered" for key in registered)]:
            self._tally.add(LEAKS, leak)

    def _count_leaks(self) -> None:
        """Count memory that was left behind. Users of plain tritonclient must remove their own."""
        left = [path.name for client in self._saboteur.made for path in DEV_SHM.glob(f"{KEY_PREFIX}{client.pid}-*")]
        for path in DEV_SHM.glob(f"{ATTACHED_PREFIX}*"):
            if self._was_killed(path.name):
                path.unlink()
            else:
                left.append(path.name)
        for leak in left:
            self._tally.add(LEAKS, leak)
        for kind, growth in self._grown.items():
            self._tally.add("grown bytes", kind, growth)
            if growth > 64 << 20:  # allocators keep less for later use
                self._tally.add(LEAKS, f"memory of {kind}")

    def _was_killed(self, key: str) -> bool:
        return any(client.was_killed and f"-{client.pid}-" in key for client in self._saboteur.made)

    def _summary(self) -> str:
        requests, faults, errors = (f"{self._tally.total(group):,}" for group in ("requests", "faults", "errors"))
        return f"{requests} requests, {faults} faults, {errors} errors, {self._tally.total(WRONG)} wrong"


def run(arguments: argparse.Namespace, seed: int) -> int:
    # Clients fork. With its own handlers, grpcio hangs in fork() now and then, or its threads die in the child.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    has_private_shm = take_private_shm(512 << 20)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        tempfile.TemporaryDirectory(prefix="shm-backend-utils-soak-") as name,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting the server", total=arguments.seconds)
        kinds = [kind for kind in ATTACKS if arguments.with_truncation or not kind.kills]

        def on_tick(elapsed: float, text: str) -> None:
            progress.update(task, completed=elapsed, description=text)

        if arguments.hostile:
            report = assault(seed, kinds, has_private_shm, Path(name), arguments.seconds, on_tick)
        else:
            report = Soak(seed, arguments.clients, has_private_shm, Path(name)).run(arguments.seconds, on_tick)
    reaper.reap()  # what models and clients that were killed in the end have left
    report.show(Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0 if report.is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=positive_float, default=60.0, help="default: %(default)s")
    parser.add_argument("--clients", type=positive, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--hostile", action="store_true", help="measure honest clients beside hostile ones instead")
    parser.add_argument("--with-truncation", action="store_true", help="truncate memory of models, too: they die of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--seed", type=int, metavar="N", help="of all that is left to chance; a new one if not given")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    return exit_status(lambda: run(arguments, seed), MachineError)


if __name__ == "__main__":
    sys.exit(main())
