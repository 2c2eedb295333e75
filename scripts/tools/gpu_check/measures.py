"""How both levels measure: cases in turns, and medians."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from ..figures import in_words, medians_ms
from .report import Figure

_WARM_UP_ROUNDS: Final = 20
_SLOW_WARM_UP_ROUNDS: Final = 3

_Prepared = TypeVar("_Prepared")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Amounts:
    rounds: int  # how often each case is measured
    identity_bytes: tuple[int, ...]  # from the smallest to the largest
    large_bytes: int  # of the input of everything else that is measured
    slow_rounds: int  # how often that is measured which takes tens of milliseconds
    requests: int  # so many requests over so many regions of this size
    regions: int
    region_bytes: int


FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 30, 10_000, 64, 2**22)
SMALL: Final = Amounts(3, (2**10, 2**12, 2**16), 2**16, 2, 30, 6, 2**14)


def ratio(name: str, above_ms: float, below_ms: float, unit: str, **limits: Any) -> Figure:
    return Figure(name, above_ms / below_ms, unit, f"{above_ms:.4f} ms / {below_ms:.4f} ms", **limits)


def medians_of(rounds: int, **cases: Callable[[], object]) -> dict[str, float]:
    return medians_ms(cases, range(-min(_WARM_UP_ROUNDS, rounds), rounds))


def identity_medians(
    prepare: Callable[[int], AbstractContextManager[_Prepared]],
    call: Callable[[_Prepared], object],
    sizes: Iterable[int],
    rounds: int,
    **others: Callable[[], object],
) -> dict[str, float]:
    """Return what a call takes at each size, by :func:`.in_words`, and what others take, by their names."""
    with ExitStack() as stack:
        prepared = {in_words(size): partial(call, stack.enter_context(prepare(size))) for size in sizes}
        return medians_of(rounds, **others, **prepared)


def in_turns(cases: Mapping[str, Callable[[int], _Result]], rounds: int) -> dict[str, list[_Result]]:
    """Run every case in each round, by its number, after some rounds to warm up; return what they returned."""
    found: dict[str, list[_Result]] = {name: [] for name in cases}
    for round_number in range(-min(_SLOW_WARM_UP_ROUNDS, rounds), rounds):
        for name, case in cases.items():
            result = case(round_number)
            if round_number >= 0:
                found[name].append(result)
    return found
