"""What many threads, or many tasks, of one process call: one client each way, which all of them share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Final

import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient

from .bench import Bench
from .payloads import Floats, in_band
from .registered_pair import RegisteredPair
from .ways import OURS, STOCK, Send, check

__all__ = ["STOCK_IN_BAND", "STOCK_TRITON_SHM", "AsyncSend", "for_tasks", "for_threads"]

AsyncSend = Callable[[Floats], Awaitable[None]]

STOCK_IN_BAND: Final = "stock"
"""The peer that the limits are of: tritonclient in band with a stock model."""
STOCK_TRITON_SHM: Final = "stock triton shm"


@contextmanager
def for_threads(bench: Bench, most_bytes: int, threads: int) -> Iterator[Mapping[str, Send]]:
    """Give what threads call, over gRPC. Each has regions of its own where Triton's shared memory is used."""
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        plain = bench.plain_client()
        stack.callback(plain.close)
        free = [RegisteredPair(stack, plain, "grpc", most_bytes) for _ in range(threads)]

        def ours(x: Floats) -> None:
            with client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                check(result["OUTPUT0"], x)

        def stock(x: Floats) -> None:
            check(plain.infer(STOCK, in_band(x)).as_numpy("OUTPUT0"), x)

        def system_shm(x: Floats) -> None:
            pair = free.pop()
            pair.fill(x)
            plain.infer(STOCK, pair.inputs, outputs=pair.outputs)
            check(pair.received(x.shape), x)
            free.append(pair)

        yield {"ours": ours, STOCK_IN_BAND: stock, STOCK_TRITON_SHM: system_shm}


@asynccontextmanager
async def for_tasks(bench: Bench, most_bytes: int, tasks: int) -> AsyncIterator[Mapping[str, AsyncSend]]:
    """Give what tasks call, over gRPC. Each has regions of its own where Triton's shared memory is used."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncShmClient(bench.server.grpc_url))
        plain = await stack.enter_async_context(tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url))
        registrar = bench.plain_client()
        stack.callback(registrar.close)
        free = [RegisteredPair(stack, registrar, "grpc", most_bytes) for _ in range(tasks)]

        async def ours(x: Floats) -> None:
            with await client.infer(OURS, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                check(result["OUTPUT0"], x)

        async def stock(x: Floats) -> None:
            check((await plain.infer(STOCK, in_band(x))).as_numpy("OUTPUT0"), x)

        async def system_shm(x: Floats) -> None:
            pair = free.pop()
            pair.fill(x)
            await plain.infer(STOCK, pair.inputs, outputs=pair.outputs)
            check(pair.received(x.shape), x)
            free.append(pair)

        yield {"ours": ours, STOCK_IN_BAND: stock, STOCK_TRITON_SHM: system_shm}
