"""A task may be cancelled at any point of its call."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from shm_backend_utils.client import AsyncShmClient

LARGE = np.ones(16 * 2**20, np.float32)  # so large that it is copied in a thread


def test_a_call_that_is_cancelled_while_its_inputs_are_copied_gives_its_memory_back(url: str) -> None:
    async def cancel_often() -> None:
        async with AsyncShmClient(url) as client:
            await client.infer("identity", {"INPUT0": LARGE})
            for _ in range(5):
                task = asyncio.ensure_future(client.infer("identity", {"INPUT0": LARGE}))
                while client.stats().slots_held == 0:
                    await asyncio.sleep(0)
                task.cancel()
                assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
                await until_all_memory_is_back(client)
            result = await client.infer("identity", {"INPUT0": LARGE * 2})
            assert (result["OUTPUT0"] == 2).all()

    asyncio.run(cancel_often())


async def until_all_memory_is_back(client: AsyncShmClient) -> None:
    deadline = time.monotonic() + 20
    while client.stats().slots_held or client.stats().quarantined:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
