"""How many calls, and uploads, one client makes per second when many use it, beside tritonclient in band.

Both send the same arrays, of different lengths. Calls get them back, and read the end of each; uploads get little.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Amounts, Bench
from ..rates import Rates, rate_ratio, rates_of_tasks, rates_of_threads
from ..ways import COMPARED, Floats, Upload, for_tasks, for_threads, in_band, most_bytes, uploads_of, varying

THREADS: Final = 16
TASKS: Final = 64
LEAST: Final[Mapping[int, Mapping[str, float]]] = {
    1: {"threads": 1.4, "tasks": 1.15},
    16: {"threads": 1.8, "tasks": 1.3},
    64: {"threads": 1.7},
}
"""By KiB."""
PICTURE: Final = "concurrency"
PICTURE_BYTES: Final = (2**14, 2**20)
CALLERS: Final = (1, 4, 16, 64)
PERIOD_S: Final = 0.4
PERIODS: Final = 2

_Call = TypeVar("_Call")

UPLOAD_BYTES: Final = {"50 KB": 50_000, "1 MB": 1_000_000}
LEAST_OF_UPLOADS: Final[Mapping[str, float]] = {"50 KB": 1.2, "1 MB": 1.5}
UPLOADERS: Final = {"1 thread": 1, "4 threads": 4}
OURS: Final = "session_row_sums"
STOCK: Final = "stock_row_sums"


def throughput(bench: Bench) -> list[Figure]:
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
    """Measure what the picture shows, in fewer and shorter periods: there is nothing that they are held to."""
    amounts = bench.amounts
    amounts = replace(amounts, period_s=min(PERIOD_S, amounts.period_s), periods=min(PERIODS, amounts.periods))
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
                    bench.add_point(PICTURE, panel, name, callers, statistics.median(rates))
    return []


def _threads(
    bench: Bench, arrays: list[Floats], threads: int, amounts: Amounts, names: Iterable[str] | None = None
) -> Rates:
    what = f"calls of {threads} threads"
    with for_threads(bench, "grpc", most_bytes(arrays), threads) as calls:
        return rates_of_threads(bench, what, _chosen(calls, names), arrays, threads, amounts)


async def _tasks(
    bench: Bench, arrays: list[Floats], tasks: int, amounts: Amounts, names: Iterable[str] | None = None
) -> Rates:
    what = f"calls of {tasks} tasks"
    async with for_tasks(bench, most_bytes(arrays), tasks) as calls:
        return await rates_of_tasks(bench, what, _chosen(calls, names), arrays, tasks, amounts)


def _chosen(calls: Mapping[str, _Call], names: Iterable[str] | None) -> dict[str, _Call]:
    return dict(calls) if names is None else {name: calls[name] for name in names}


def uploads(bench: Bench) -> list[Figure]:
    figures = []
    for size, byte_size in UPLOAD_BYTES.items():
        given = uploads_of(byte_size)
        for protocol in bench.urls:
            for who, threads in UPLOADERS.items():
                name = f"{protocol}: uploads of around {size}, {who}, shapes varying"
                rates = _rates(bench, name, protocol, given, threads)
                unit = "× the rate of tritonclient in band with a stock model"
                figures.append(rate_ratio(name, rates, unit, at_least=LEAST_OF_UPLOADS[size]))
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
