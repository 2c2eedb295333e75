"""The result of a measurement: a figure, its basis, and its limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shm_backend_utils.cli.common.rounds import shuffled


@dataclass(frozen=True)
class Figure:
    """One figure, as a rule a ratio of two medians of one run: those are its basis."""

    name: str
    figure: float
    unit: str
    basis: str  # the values from which it was calculated, in words
    at_most: float | None = None  # its limit, if it has one
    at_least: float | None = None

    @property
    def is_held(self) -> bool | None:
        """Whether the limit is held; None if there is none."""
        if self.at_most is not None:
            return self.figure <= self.at_most
        return None if self.at_least is None else self.figure >= self.at_least

    @property
    def held_to(self) -> str:
        """The limit in words; empty if there is none."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"


class Times:
    """The time of each case in every round."""

    def __init__(self, names: Iterable[str]) -> None:
        self._milliseconds: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, round_number: int, begin: float) -> None:
        """Keep the time since ``begin``, by ``time.perf_counter``; a round below 0 only warms up."""
        if round_number >= 0:
            self._milliseconds[name].append((time.perf_counter() - begin) * 1e3)

    def medians(self) -> dict[str, float]:
        """Return the median of each case, in milliseconds."""
        return {name: statistics.median(values) for name, values in self._milliseconds.items()}


def medians_ms(
    cases: Mapping[str, Callable[[], object]],
    rounds: Iterable[int],
    before: Callable[[str], object] = lambda case: None,  # what comes before a case
) -> dict[str, float]:
    """Run every case once per round, so that the machine's load hits all alike; rounds below 0 only warm up."""
    times = Times(cases)
    for number in rounds:
        for name in shuffled(cases, number):
            case = cases[name]
            before(name)
            begin = time.perf_counter()
            case()
            times.add(name, number, begin)
    return times.medians()


def in_words(byte_size: float) -> str:
    """Return a number of bytes in words, such as ``4 KiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if byte_size >= factor:
            return f"{byte_size / factor:g} {unit}"
    return f"{byte_size:g} B"
