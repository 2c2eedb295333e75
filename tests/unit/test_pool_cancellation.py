"""Tasks that are cancelled while they wait for memory, or while it is being made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.paths.taking import Taking
from shm_backend_utils.client.settings import CallSettings
from shm_backend_utils.client.steps import AsyncioDriver
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.origin import Origin
from shm_backend_utils.protocol.layout import PAGE_SIZE, data_offset

REGION = data_offset(1, PAGE_SIZE) + PAGE_SIZE
LONG_S = 30.0
MODEL = KnownModel(ModelSpec.from_config({"name": "m"}), head_room=1)


class Take:
    """Takes a region as a call does, and makes it in the only thread that there is."""

    def __init__(self, memory: ClientMemory) -> None:
        self._taking = Taking(memory.pool)
        self._driver = AsyncioDriver(cast(Any, None))
        self.threads = self._driver._threads = concurrent.futures.ThreadPoolExecutor(1)

    def __call__(self) -> Awaitable[object]:
        settings = CallSettings("m", "", "auto", time.monotonic() + LONG_S, RequestOptions(), Origin.here("infer"))
        return self._driver.run(self._taking.take(settings, MODEL, MODEL.data_begin + 1, 1, "direct"))


def with_one_region(work: Callable[[SlotPool, Take], Awaitable[None]]) -> None:
    """Do work with a pool that may have one region."""

    async def main() -> None:
        memory = ClientMemory(PoolOptions(max_bytes=REGION), CudaAccess())
        take = Take(memory)
        with contextlib.closing(memory.pool), take.threads:
            await work(memory.pool, take)

    asyncio.run(main())


async def cancelled(task: asyncio.Task[object]) -> None:
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def nothing_is_held(pool: SlotPool) -> None:
    while pool.status.held:  # the thread that made it has it for a moment longer
        await asyncio.sleep(0.001)


def test_a_task_that_is_cancelled_while_it_waits_takes_nothing() -> None:
    async def work(pool: SlotPool, take: Take) -> None:
        held = await take()
        await cancelled(asyncio.ensure_future(take()))
        assert pool.status.held == 1
        del held
        await nothing_is_held(pool)
        assert await take()

    with_one_region(work)


def test_a_task_that_is_cancelled_while_its_memory_is_made_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    make = SlotRegion.__init__

    def make_slowly(self: SlotRegion, *arguments: Any) -> None:
        begun.set()
        go.wait(LONG_S)
        make(self, *arguments)

    monkeypatch.setattr(SlotRegion, "__init__", make_slowly)

    async def work(pool: SlotPool, take: Take) -> None:
        task = asyncio.ensure_future(take())
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, LONG_S)
        await cancelled(task)
        assert pool.status.byte_size == REGION
        go.set()
        assert await take()
        await nothing_is_held(pool)
        assert pool.status.byte_size == REGION

    with_one_region(work)


def test_a_task_that_is_cancelled_before_its_memory_is_made_takes_nothing() -> None:
    async def work(pool: SlotPool, take: Take) -> None:
        go = threading.Event()
        before = take.threads.submit(go.wait, LONG_S)
        await cancelled(asyncio.ensure_future(take()))
        go.set()
        before.result()
        assert pool.status.byte_size == 0
        assert await take()

    with_one_region(work)
