"""How many calls per second there are: all cases in turn, for some time each."""

from __future__ import annotations

import asyncio
import concurrent.futures
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, TypeVar

from shm_backend_utils.cli.common.rounds import shuffled

from ..figures import Figure
from .bench import Amounts, Bench
from .ways import endless

Rates = dict[str, list[float]]
"""Calls per second of each case, one number for each period."""

_Given = TypeVar("_Given")
_APART: Final = 7
_WARM_PER_PERIOD: Final = 8
"""How many callers get warm in a period. Each has memory of its own, taken anew until the longest array finds room."""


def rates_of_threads(
    bench: Bench,
    what: str,
    cases: Mapping[str, Callable[[_Given], object]],
    given: list[_Given],
    threads: int,
    amounts: Amounts,
) -> Rates:
    """Have threads call each case in turn, for a period at a time; the first of each only warms up."""
    rates: Rates = {name: [] for name in cases}
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for number in bench.shown(what, 1 + amounts.periods):
            seconds = _period_s(number, threads, amounts)
            for name in shuffled(cases, number):
                rates[name].append(rate_of_threads(pool, cases[name], given, threads=threads, seconds=seconds))
    return {name: values[1:] for name, values in rates.items()}


async def rates_of_tasks(
    bench: Bench,
    what: str,
    cases: Mapping[str, Callable[[_Given], Awaitable[object]]],
    given: list[_Given],
    tasks: int,
    amounts: Amounts,
) -> Rates:
    rates: Rates = {name: [] for name in cases}
    for number in bench.shown(what, 1 + amounts.periods):
        seconds = _period_s(number, tasks, amounts)
        for name in shuffled(cases, number):
            rates[name].append(await _rate_of_tasks(cases[name], given, tasks, seconds))
    return {name: values[1:] for name, values in rates.items()}


def _period_s(number: int, callers: int, amounts: Amounts) -> float:
    """Return how long a period takes; the first one lasts until all callers are warm."""
    return amounts.period_s * (1 if number > 0 else max(1, callers / _WARM_PER_PERIOD))


async def _rate_of_tasks(
    call: Callable[[_Given], Awaitable[object]], given: list[_Given], tasks: int, seconds: float
) -> float:
    begin = time.perf_counter()

    async def work(number: int) -> int:
        count = 0
        for x in until(begin + seconds, given, number):
            await call(x)
            count += 1
        return count

    count = sum(await asyncio.gather(*map(work, range(tasks))))
    return count / (time.perf_counter() - begin)


def rate_of_threads(
    pool: concurrent.futures.Executor,
    call: Callable[[_Given], object],
    given: list[_Given],
    *,
    threads: int,
    seconds: float,
) -> float:
    """Return how many calls per second the pool's threads make together; parameters as of :func:`rates_of_threads`."""
    begin = time.perf_counter()

    def work(number: int) -> int:
        count = 0
        for x in until(begin + seconds, given, number):
            call(x)
            count += 1
        return count

    count = sum(pool.map(work, range(threads)))
    return count / (time.perf_counter() - begin)


def until(end: float, given: list[_Given], number: int) -> Iterator[_Given]:
    """Return what one of many threads or tasks has to send, once at least, until a time by ``time.perf_counter``."""
    for x in endless(given, _APART * number):
        yield x
        if time.perf_counter() >= end:
            return


def rate_ratio(name: str, rates: Rates, unit: str, *, at_least: float) -> Figure:
    """Return the rate of ``ours`` over that of ``stock``: the median of what it was in each period."""
    ratio = statistics.median(ours / stock for ours, stock in zip(rates["ours"], rates["stock"], strict=True))
    ours, stock = (statistics.median(rates[case]) for case in ("ours", "stock"))
    return Figure(name, ratio, unit, f"{ours:,.0f} /s / {stock:,.0f} /s", at_least=at_least)
