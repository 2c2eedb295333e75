"""Tasks that are cancelled while they wait for memory, or while it is being made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable

import pytest
from shm_backend_utils.client.engine import Engine
from shm_backend_utils.client.runtime import AsyncioRuntime
from shm_backend_utils.client.terms import Terms

from shm_backend_utils.client.transports.connect import connect_async
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
LONG_S = 30.0

Take = Callable[[], Awaitable[object]]


def with_one_region(work: Callable[[Terms, Take], Awaitable[None]]) -> None:
    """Do work with a pool that may have one region, and a function that takes it as a call does."""

    async def main() -> None:
        terms = Terms("localhost:8001", LONG_S, "auto", PoolOptions(max_bytes=REGION), None, None)
        with contextlib.closing(terms.memory.pool):
            engine = Engine(connect_async(terms.url, None), AsyncioRuntime(), terms.memory)
            try:
                await work(
                    terms,
                    lambda: engine.berths.take_region(terms.demand("infer", "model", None, None, {}), 1, 1, "direct"),
                )
            finally:
                await engine.close()

    asyncio.run(main())


async def cancelled(task: asyncio.Task[object]) -> None:
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_task_that_is_cancelled_while_it_waits_takes_nothing() -> None:
    async def work(terms: Terms, take: Take) -> None:
        held = await take()
        await cancelled(asyncio.ensure_future(take()))
        assert terms.memory.pool.status.held == 1
        del held
        while terms.memory.pool.status.held:  # the thread that made it has it for a moment longer
            await asyncio.sleep(0.001)
        assert await take()

    with_one_region(work)


def test_a_task_that_is_cancelled_before_its_memory_is_made_takes_nothing() -> None:
    async def work(terms: Terms, take: Take) -> None:
        go = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as busy:
            asyncio.get_running_loop().set_default_executor(busy)
            before = busy.submit(go.wait, LONG_S)
            await cancelled(asyncio.ensure_future(take()))
            go.set()
            before.result()
            assert terms.memory.pool.status.byte_size == 0
            assert await take()

    with_one_region(work)
