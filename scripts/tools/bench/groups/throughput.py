"""How many calls per second one client makes when many use it, beside tritonclient in band with a stock model.

Both send the same arrays, of different lengths, get them back, and read the end of each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Final

import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient

from ...common.figures import Figure
from ...common.rounds import shuffled
from ..payloads import Floats, in_band, varying
from ..rates import Rates, rate_ratio, rates_of_threads, until
from ..rounds import Bench

__all__ = ["throughput"]

THREADS: Final = 16
TASKS: Final = 64
LEAST: Final[Mapping[int, float]] = {1: 1.0, 16: 1.15}
"""By KiB."""
STOCK: Final = "stock_identity"
OURS: Final = "identity"


def throughput(bench: Bench) -> list[Figure]:
    """Measure threads and tasks, over gRPC."""
    figures = []
    unit = "× the calls of tritonclient in band with a stock model"
    for kibibytes, least in LEAST.items():
        arrays = varying(kibibytes << 10)
        rates = {f"{THREADS} threads": _threads(bench, arrays), f"{TASKS} tasks": asyncio.run(_tasks(bench, arrays))}
        for who, found in rates.items():
            figures.append(rate_ratio(f"{who}, around {kibibytes} KiB, shapes varying", found, unit, at_least=least))
    return figures


def _threads(bench: Bench, arrays: list[Floats]) -> Rates:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        plain = bench.plain_client()
        stack.callback(plain.close)

        def infer(x: Floats) -> None:
            with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                _check(result["OUTPUT0"], x)

        def plain_infer(x: Floats) -> None:
            _check(plain.infer(STOCK, in_band(x)).as_numpy("OUTPUT0"), x)

        cases = {"ours": infer, "stock": plain_infer}
        return rates_of_threads(bench, "throughput of threads", cases, arrays, THREADS)


async def _tasks(bench: Bench, arrays: list[Floats]) -> Rates:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncShmClient(bench.server.grpc_url))
        plain = await stack.enter_async_context(tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url))

        async def infer(x: Floats) -> None:
            with await client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                _check(result["OUTPUT0"], x)

        async def plain_infer(x: Floats) -> None:
            _check((await plain.infer(STOCK, in_band(x))).as_numpy("OUTPUT0"), x)

        async def rate(call: Callable[[Floats], Awaitable[None]]) -> float:
            begin = time.perf_counter()

            async def work(number: int) -> int:
                count = 0
                for x in until(begin + bench.amounts.period_s, arrays, number):
                    await call(x)
                    count += 1
                return count

            count = sum(await asyncio.gather(*map(work, range(TASKS))))
            return count / (time.perf_counter() - begin)

        cases = {"ours": infer, "stock": plain_infer}
        rates: Rates = {name: [] for name in cases}
        for number in bench.shown("throughput of tasks", 1 + bench.amounts.periods):
            for name in shuffled(cases, number):
                rates[name].append(await rate(cases[name]))
    return {name: values[1:] for name, values in rates.items()}


def _check(y: Floats, x: Floats) -> None:
    if y.shape != x.shape or y[-1] != x[-1]:
        raise AssertionError("a call got another one's answer")
