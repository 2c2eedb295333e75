"""How the bench measures: every case once per round, and medians over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import tritonclient.grpc
import tritonclient.http
from rich.progress import Progress

from shm_backend_utils.server import EmbeddedServer

__all__ = ["WARM_UP_ROUNDS", "AsyncCases", "Bench", "Cases", "Medians"]

Cases = Mapping[str, Callable[[], object]]
AsyncCases = Mapping[str, Callable[[], Awaitable[object]]]

WARM_UP_ROUNDS: Final = 20


class Medians(dict[str, float]):
    """Median time of each case, in milliseconds."""

    def pair(self, one: str, other: str) -> str:
        """Return two of them in words."""
        return f"{self[one]:.3f} ms / {self[other]:.3f} ms"


class Bench:
    """A server to measure against, and how often to.

    Attributes
    ----------
    server : EmbeddedServer
    rounds : int
        How often each case runs.
    medians : dict of str to Medians
        All that were measured, by what was measured.
    """

    def __init__(self, server: EmbeddedServer, rounds: int, progress: Progress) -> None:
        self.server = server
        self.rounds = rounds
        self.medians: dict[str, Medians] = {}
        self._progress = progress

    @property
    def urls(self) -> dict[str, str]:
        """The server's address for ShmClient, by protocol."""
        return {"grpc": self.server.grpc_url, "http": f"http://{self.server.http_url}"}

    def plain_client(self, protocol: str) -> Any:
        """Return tritonclient's client, to be closed."""
        if protocol == "grpc":
            return tritonclient.grpc.InferenceServerClient(self.server.grpc_url)
        return tritonclient.http.InferenceServerClient(self.server.http_url)

    def shown(self, what: str, count: int) -> Iterator[int]:
        """Count up to ``count``, showing progress."""
        task = self._progress.add_task(what, total=count)
        for number in range(count):
            yield number
            self._progress.advance(task)
        self._progress.remove_task(task)

    def rounds_with_warm_up(self, what: str, rounds: int | None = None) -> Iterator[int]:
        """Count the rounds, from below 0 to warm up, showing progress."""
        for number in self.shown(what, WARM_UP_ROUNDS + (rounds or self.rounds)):
            yield number - WARM_UP_ROUNDS

    def measure(self, what: str, cases: Cases, rounds: int | None = None) -> Medians:
        """Run every case once per round, so that whatever the machine does meanwhile hits all alike."""
        times = _Times(cases)
        for number in self.rounds_with_warm_up(what, rounds):
            for name in _rotated(cases, number):
                case = cases[name]
                begin = time.perf_counter()
                case()
                times.add(name, number, begin)
        return self._medians(what, times)

    async def measure_async(self, what: str, cases: AsyncCases, rounds: int | None = None) -> Medians:
        """As :meth:`measure`, for cases that are awaited, one after another."""
        times = _Times(cases)
        for number in self.rounds_with_warm_up(what, rounds):
            for name in _rotated(cases, number):
                case = cases[name]
                begin = time.perf_counter()
                await case()
                times.add(name, number, begin)
        return self._medians(what, times)

    def _medians(self, what: str, times: _Times) -> Medians:
        medians = self.medians[what] = times.medians()
        return medians


def _rotated(names: Cases | AsyncCases, round_number: int) -> list[str]:
    """Return the names, beginning with another one in each round: the first finds the caches coldest."""
    order = list(names)
    first = round_number % len(order)
    return order[first:] + order[:first]


class _Times:
    def __init__(self, names: Cases | AsyncCases) -> None:
        self._milliseconds: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, round_number: int, begin: float) -> None:
        if round_number >= 0:
            self._milliseconds[name].append((time.perf_counter() - begin) * 1e3)

    def medians(self) -> Medians:
        return Medians({name: statistics.median(values) for name, values in self._milliseconds.items()})
