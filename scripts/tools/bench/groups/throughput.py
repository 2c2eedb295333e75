"""How many calls per second one client makes when many use it, beside tritonclient in band with a stock model.

Both send the same arrays, of different lengths, get them back, and read the end of each.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from ...figures import Figure
from ..bench import Amounts, Bench
from ..payloads import Floats, varying
from ..rates import STOCK_IN_BAND, Rates, for_tasks, for_threads, rate_ratio, rates_of_tasks, rates_of_threads

THREADS: Final = 16
TASKS: Final = 64
LEAST: Final[Mapping[int, Mapping[str, float]]] = {
    1: {"threads": 1.4, "tasks": 1.15},
    16: {"threads": 1.8, "tasks": 1.3},
    64: {"threads": 1.7},
}
"""By KiB."""
COMPARED: Final = ("ours", STOCK_IN_BAND)

PICTURE: Final = "concurrency"
PICTURE_BYTES: Final = (2**14, 2**20)
CALLERS: Final = (1, 4, 16, 64)
PERIOD_S: Final = 0.4
PERIODS: Final = 2

_Call = TypeVar("_Call")


def throughput(bench: Bench) -> list[Figure]:
    """Measure threads and tasks, over gRPC."""
    figures = []
    unit = "× the calls of tritonclient in band with a stock model"
    for kibibytes, least in LEAST.items():
        arrays = varying(kibibytes << 10)
        rates = {"threads": (THREADS, _threads(bench, arrays, THREADS, bench.amounts, COMPARED))}
        if "tasks" in least:
            rates["tasks"] = TASKS, asyncio.run(_tasks(bench, arrays, TASKS, bench.amounts, COMPARED))
        for callers, (count, found) in rates.items():
            name = f"{count} {callers}, around {kibibytes} KiB, shapes varying"
            figures.append(rate_ratio(name, found, unit, at_least=least[callers]))
    return figures


def concurrency(bench: Bench) -> list[Figure]:
    """Measure what the picture shows: from one caller to many, and Triton's own shared memory as well.

    In fewer and shorter periods; there is nothing that they are held to.
    """
    amounts = bench.amounts.with_periods(PERIOD_S, PERIODS)
    measured: dict[str, Callable[[list[Floats], int], Rates]] = {
        "threads": lambda arrays, callers: _threads(bench, arrays, callers, amounts),
        "tasks": lambda arrays, callers: asyncio.run(_tasks(bench, arrays, callers, amounts)),
    }
    for byte_size in PICTURE_BYTES:
        arrays = varying(byte_size)
        for who, measure in measured.items():
            for callers in CALLERS:
                for name, rates in measure(arrays, callers).items():
                    panel = f"{who}, {byte_size} bytes"
                    bench.curves.add(PICTURE, panel, name, callers, statistics.median(rates))
    return []


def _threads(
    bench: Bench, arrays: list[Floats], threads: int, amounts: Amounts, names: Iterable[str] | None = None
) -> Rates:
    what = f"calls of {threads} threads"
    with for_threads(bench, _most_bytes(arrays), threads) as calls:
        return rates_of_threads(bench, what, _chosen(calls, names), arrays, threads, amounts)


async def _tasks(
    bench: Bench, arrays: list[Floats], tasks: int, amounts: Amounts, names: Iterable[str] | None = None
) -> Rates:
    what = f"calls of {tasks} tasks"
    async with for_tasks(bench, _most_bytes(arrays), tasks) as calls:
        return await rates_of_tasks(bench, what, _chosen(calls, names), arrays, tasks, amounts)


def _chosen(calls: Mapping[str, _Call], names: Iterable[str] | None) -> dict[str, _Call]:
    return dict(calls) if names is None else {name: calls[name] for name in names}


def _most_bytes(arrays: list[Floats]) -> int:
    return max(x.nbytes for x in arrays)
