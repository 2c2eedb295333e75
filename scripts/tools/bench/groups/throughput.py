"""How many calls per second one client makes when many use it, beside what tritonclient reaches with empty requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient

from ...common.figures import Figure
from ..rounds import Bench

__all__ = ["throughput"]

THREADS: Final = 16
TASKS: Final = 64
LEAST_SHARE: Final = 0.85
PERIOD_S: Final = 1.5
WARM_UP_PERIODS: Final = 1
PERIODS: Final = 5
TENSOR: Final = np.ones(16, np.float32)

Pairs = list[tuple[float, float]]
"""Calls per second, ours and tritonclient's, of periods that followed each other."""


def throughput(bench: Bench) -> list[Figure]:
    """Measure threads and tasks; over HTTP for information."""
    figures = []
    for protocol in bench.urls:
        with ExitStack() as stack:
            figures.append(_figure(f"{protocol}: {THREADS} threads, infer 64 B", _threads(bench, protocol, stack)))
        figures.append(_figure(f"{protocol}: {TASKS} tasks, infer 64 B", asyncio.run(_tasks(bench, protocol))))
    return figures


def _figure(name: str, pairs: Pairs) -> Figure:
    share = statistics.median(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    unit, basis = "× tritonclient's empty requests", f"{ours:,.0f} /s / {theirs:,.0f} /s"
    return Figure(name, share, unit, basis, at_least=LEAST_SHARE if name.startswith("grpc") else None)


def _threads(bench: Bench, protocol: str, stack: ExitStack) -> Pairs:
    client = stack.enter_context(ShmClient(bench.urls[protocol]))
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS))
    bare_request = _bare_request(bench, protocol, stack)

    def rate(request: Callable[[], object]) -> float:
        begin = time.perf_counter()
        end = begin + PERIOD_S

        def work(_: int) -> int:
            count = 0
            while time.perf_counter() < end:
                request()
                count += 1
            return count

        count = sum(pool.map(work, range(THREADS)))
        return count / (time.perf_counter() - begin)

    pairs = []
    for _ in bench.shown(f"throughput of threads, {protocol}", WARM_UP_PERIODS + PERIODS):
        ours = rate(lambda: client.infer("identity", {"INPUT0": TENSOR})["OUTPUT0"])
        pairs.append((ours, rate(bare_request)))
    return pairs[WARM_UP_PERIODS:]


def _bare_request(bench: Bench, protocol: str, stack: ExitStack) -> Callable[[], object]:
    """Return an empty request of tritonclient; over HTTP, of a client for each thread, as it cannot share one."""
    if protocol == "grpc":
        shared = bench.plain_client(protocol)
        stack.callback(shared.close)
        return lambda: shared.infer("empty", [])
    of_thread = threading.local()

    def request() -> object:
        client = getattr(of_thread, "client", None)
        if client is None:
            client = of_thread.client = bench.plain_client(protocol)
        return client.infer("empty", [])

    return request


async def _tasks(bench: Bench, protocol: str) -> Pairs:
    async def rate(request: Callable[[], Awaitable[object]]) -> float:
        begin = time.perf_counter()
        end = begin + PERIOD_S

        async def work() -> int:
            count = 0
            while time.perf_counter() < end:
                await request()
                count += 1
            return count

        count = sum(await asyncio.gather(*(work() for _ in range(TASKS))))
        return count / (time.perf_counter() - begin)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncShmClient(bench.urls[protocol]))
        bare = await stack.enter_async_context(_bare_client(bench, protocol))
        pairs = []
        for _ in bench.shown(f"throughput of tasks, {protocol}", WARM_UP_PERIODS + PERIODS):
            ours = await rate(lambda: client.infer("identity", {"INPUT0": TENSOR}))
            pairs.append((ours, await rate(lambda: bare.infer("empty", []))))
    return pairs[WARM_UP_PERIODS:]


def _bare_client(bench: Bench, protocol: str) -> Any:
    if protocol == "grpc":
        return tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url)
    return tritonclient.http.aio.InferenceServerClient(bench.server.http_url)
