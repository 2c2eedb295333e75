"""Parts that all groups of the bench use: a server on a machine, numbers of rounds, and medians over the rounds."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http
from rich.progress import Progress

from shm_backend_utils.cli.common.rounds import shuffled
from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in, temporary_server
from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.segment import SEALED_LINK
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.server import EmbeddedServer

from ..figures import Figure, Times, medians_ms
from ..processes import children, mappings

_CODE: Final = {
    "timed_identity_8": "timed_identity",
    "trusting_identity": "identity",
    "bare_multiply_tmpfs": "bare_multiply",
}
"""Models that are another one with another configuration. No links: archives do not carry those to folders."""


TRITON: Final[Mapping[str, Any]] = {"grpc": tritonclient.grpc, "http": tritonclient.http}
"""The modules of tritonclient, by protocol."""


def bench_server() -> AbstractContextManager[EmbeddedServer]:
    models = [REPOSITORY / "identity", REPOSITORY / "multiply", *models_in(Path(__file__).with_name("models"))]

    def provide(folder: Path) -> Path:
        copy_models(models, folder)
        for model, other in _CODE.items():
            shutil.copytree(folder / other / "1", folder / model / "1")
        shutil.copy(folder / "multiply/1/model.py", folder / "counted_multiply/1/multiply.py")
        return folder

    return temporary_server("bench", provide, numpy="own")


@contextmanager
def models_on_a_core_of_their_own(server: EmbeddedServer) -> Iterator[None]:
    """Keep the server's stubs on one core, and the server and this process off it, so that the caches are theirs."""
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    stubs = children(server.pid)
    others = [server.pid, os.getpid()]
    try:
        for pid in stubs:
            _pin(pid, {core})
        for pid in others:
            _pin(pid, everywhere - {core} or everywhere)
        yield
    finally:
        for pid in [*stubs, *others]:
            _pin(pid, everywhere)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def describe(plain: Any) -> dict[str, str]:
    """Return what is known of the machine and what runs on it; ``plain`` is tritonclient's client of the server."""
    processor = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor[1] if processor else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "Triton": plain.get_server_metadata().version,
        "tritonclient": version("tritonclient"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


_SEALED: Final = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(SEALED_LINK)}$", re.MULTILINE)


def sealed_bytes(pid: int) -> int:
    maps = "\n".join(mappings(pid))
    return sum(int(end, 16) - int(begin, 16) for begin, end in _SEALED.findall(maps))


def shared_bytes(prefix: str) -> int:
    """Return how much memory the objects of ``/dev/shm`` take whose names begin so."""
    total = 0
    for path in DEV_SHM.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            total += 512 * path.stat().st_blocks
    return total


@dataclass(frozen=True)
class Amounts:
    rounds: int = 300  # of each case
    slow_rounds: int = 30  # of those that take tens of milliseconds, or more
    period_s: float = 1.5  # for how long calls are counted at a time
    periods: int = 5  # how many of these there are of each case
    requests: int = 100_000  # at random, to see what grows
    largest_bytes: int = 2**30  # of a tensor in the pictures


FULL: Final = Amounts()
QUICK: Final = Amounts(rounds=30, slow_rounds=3, period_s=0.1, periods=2, requests=2_000, largest_bytes=2**20)
"""To see whether everything works."""


class Medians(dict[str, float]):  # in milliseconds, by case
    def ratio(self, name: str, one: str, other: str, unit: str, **limits: float | None) -> Figure:
        return Figure(name, self[one] / self[other], unit, f"{self[one]:.3f} ms / {self[other]:.3f} ms", **limits)


class Bench:
    """A server to measure against, how often to, and all medians by what was measured."""

    def __init__(self, server: EmbeddedServer, amounts: Amounts, progress: Progress) -> None:
        self.server = server
        self.amounts = amounts
        self.medians: dict[str, Medians] = {}
        self.curves: dict[str, dict[str, dict[str, dict[int, float]]]] = {}  # by picture, panel and line
        self._progress = progress

    @property
    def urls(self) -> dict[str, str]:
        return {"grpc": self.server.grpc_url, "http": f"http://{self.server.http_url}"}

    def plain_client(self, protocol: str = "grpc") -> Any:
        return TRITON[protocol].InferenceServerClient(self.urls[protocol].removeprefix("http://"))

    def direct_client(self) -> ShmClient:
        """Return this library's client, whose small calls go direct as well; to be closed."""
        return ShmClient(self.server.grpc_url, inline_bytes=0)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def shown(self, what: str, count: int) -> Iterator[int]:
        task = self._progress.add_task(what, total=count)
        for number in range(count):
            yield number
            self._progress.advance(task)
        self._progress.remove_task(task)

    def rounds_with_warm_up(
        self, what: str, rounds: int | None = None, warm_up_rounds: int | None = None
    ) -> Iterator[int]:
        """Count the rounds, from below 0 to warm up, showing progress."""
        rounds = rounds or self.amounts.rounds
        first = min(rounds, 20) if warm_up_rounds is None else warm_up_rounds
        for number in self.shown(what, first + rounds):
            yield number - first

    def measure(
        self,
        what: str,
        cases: Mapping[str, Callable[[], object]],
        rounds: int | None = None,
        *,
        warm_up_rounds: int | None = None,
        before: Callable[[str], object] = lambda case: None,
    ) -> Medians:
        numbers = self.rounds_with_warm_up(what, rounds, warm_up_rounds)
        medians = self.medians[what] = Medians(medians_ms(cases, numbers, before))
        return medians

    async def measure_async(
        self, what: str, cases: Mapping[str, Callable[[], Awaitable[object]]], rounds: int
    ) -> Medians:
        times = Times(cases)
        for number in self.rounds_with_warm_up(what, rounds):
            for name in shuffled(cases, number):
                case = cases[name]
                begin = time.perf_counter()
                await case()
                times.add(name, number, begin)
        medians = self.medians[what] = Medians(times.medians())
        return medians

    def add_point(self, picture: str, panel: str, line: str, x: int, y: float) -> None:
        """Keep a point of a group's picture and of a panel of it; both numbers are above 0."""
        self.curves.setdefault(picture, {}).setdefault(panel, {}).setdefault(line, {})[x] = y


def allow_many_descriptors() -> None:
    """Let this process and its children open as many files as they may: slots and their mappings are files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
