"""How many calls, and uploads, one client makes per second when many use it, beside tritonclient in band."""

from __future__ import annotations

import asyncio
import concurrent.futures
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from shm_backend_utils.cli.common.rounds import shuffled
from shm_backend_utils.client import ShmClient

from ...figures import Figure, in_words
from ..bench import Amounts, Bench
from ..ways import COMPARED, Floats, Upload, endless, for_tasks, for_threads, in_band, most_bytes, uploads_of, varying

Rates = dict[str, list[float]]
"""Calls per second of each case, one number for each period."""

_Given = TypeVar("_Given")


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


def _period_s(number: int, callers: int, amounts: Amounts) -> float:
    """Return how long a period takes; the first is longer if more than 8 callers have to get warm."""
    return amounts.period_s * (1 if number > 0 else max(1, callers / 8))


async def _rate_of_tasks(
    call: Callable[[Floats], Awaitable[None]], given: list[Floats], tasks: int, seconds: float
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
    for x in endless(given, 7 * number):
        yield x
        if time.perf_counter() >= end:
            return


def rate_ratio(name: str, rates: Rates, unit: str, *, at_least: float) -> Figure:
    """Return the rate of ``ours`` over that of ``stock``: the median of what it was in each period."""
    ratio = statistics.median(ours / stock for ours, stock in zip(rates["ours"], rates["stock"], strict=True))
    ours, stock = (statistics.median(rates[case]) for case in ("ours", "stock"))
    return Figure(name, ratio, unit, f"{ours:,.0f} /s / {stock:,.0f} /s", at_least=at_least)


THREADS: Final = 16
TASKS: Final = 64
LEAST: Final[Mapping[int, Mapping[str, float]]] = {
    1: {"threads": 1.4, "tasks": 1.15},
    16: {"threads": 1.8, "tasks": 1.3},
    64: {"threads": 1.7},
}
"""By KiB."""
PICTURE: Final = "concurrency"
LINES: Final = (*COMPARED, "stock triton shm")

OURS: Final = "session_row_sums"
STOCK: Final = "stock_row_sums"


def throughput(bench: Bench) -> list[Figure]:
    figures = []
    unit = "× the calls of tritonclient in band with a stock model"
    for kibibytes, least in LEAST.items():
        arrays = varying(kibibytes << 10)
        rates = {"threads": (THREADS, _threads(bench, arrays, THREADS, bench.amounts))}
        if "tasks" in least:
            rates["tasks"] = TASKS, asyncio.run(_tasks(bench, arrays, TASKS, bench.amounts))
        for callers, (count, found) in rates.items():
            name = f"{count} {callers}, around {kibibytes} KiB, shapes varying"
            figures.append(rate_ratio(name, found, unit, at_least=least[callers]))
    return figures


def concurrency(bench: Bench) -> list[Figure]:
    """Measure what the picture shows, in fewer and shorter periods; it is held to no limit."""
    amounts = bench.amounts
    amounts = replace(amounts, period_s=min(0.4, amounts.period_s), periods=min(2, amounts.periods))
    measured: dict[str, Callable[[list[Floats], int], Rates]] = {
        "threads": lambda arrays, callers: _threads(bench, arrays, callers, amounts, LINES),
        "tasks": lambda arrays, callers: asyncio.run(_tasks(bench, arrays, callers, amounts, LINES)),
    }
    for byte_size in (2**14, 2**20):
        arrays = varying(byte_size)
        for who, measure in measured.items():
            for callers in (1, 4, 16, 64):
                for name, rates in measure(arrays, callers).items():
                    panel = f"{who}, {in_words(byte_size)}"
                    bench.add_point(PICTURE, panel, name, callers, statistics.median(rates))
    return []


def _threads(
    bench: Bench, arrays: list[Floats], threads: int, amounts: Amounts, names: Iterable[str] = COMPARED
) -> Rates:
    what = f"calls of {threads} threads"
    with for_threads(bench, "grpc", most_bytes(arrays), threads) as calls:
        return rates_of_threads(bench, what, {name: calls[name] for name in names}, arrays, threads, amounts)


async def _tasks(
    bench: Bench, arrays: list[Floats], tasks: int, amounts: Amounts, names: Iterable[str] = COMPARED
) -> Rates:
    rates: Rates = {name: [] for name in names}
    async with for_tasks(bench, most_bytes(arrays), tasks) as calls:
        for number in bench.shown(f"calls of {tasks} tasks", 1 + amounts.periods):
            seconds = _period_s(number, tasks, amounts)
            for name in shuffled(names, number):
                rates[name].append(await _rate_of_tasks(calls[name], arrays, tasks, seconds))
    return {name: values[1:] for name, values in rates.items()}


def uploads(bench: Bench) -> list[Figure]:
    figures = []
    for size, byte_size, least in (("50 KB", 50_000, 1.2), ("1 MB", 1_000_000, 1.5)):
        given = uploads_of(byte_size)
        for protocol in bench.urls:
            for who, threads in (("1 thread", 1), ("4 threads", 4)):
                name = f"{protocol}: uploads of around {size}, {who}, shapes varying"
                rates = _rates(bench, name, protocol, given, threads)
                unit = "× the rate of tritonclient in band with a stock model"
                figures.append(rate_ratio(name, rates, unit, at_least=least))
    return figures


def _rates(bench: Bench, name: str, protocol: str, given: list[Upload], threads: int) -> Rates:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        plain = _PlainClient(bench, protocol, stack)

        def send(upload: Upload) -> None:
            with client.infer(OURS, {"INPUT0": upload.x}) as result:
                _check(result["SUMS"], upload)

        def send_in_band(upload: Upload) -> None:
            answer = plain.infer(STOCK, in_band(upload.x, protocol))
            _check(answer.as_numpy("SUMS"), upload)

        cases = {"ours": send, "stock": send_in_band}
        return rates_of_threads(bench, name, cases, given, threads, bench.amounts)


class _PlainClient(threading.local):
    """A client for each thread: over HTTP, tritonclient has one thread use one."""

    def __init__(self, bench: Bench, protocol: str, stack: ExitStack) -> None:  # in every thread
        self.infer = stack.enter_context(bench.plain_client(protocol)).infer


def _check(sums: Any, upload: Upload) -> None:
    if not np.array_equal(sums, upload.sums):
        raise AssertionError("an upload got another one's sums")
