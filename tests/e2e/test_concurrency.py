"""Many callers of one client: each gets its own bytes."""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.client.options import PathName

from .eventually import all_memory_comes_back
from .flavours import AnyClient, LoopedClient

THREADS = 16
TASKS = 64
ROUNDS = 5


def inputs_of(caller: int) -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(caller)
    return [rng.random((int(rng.integers(1, 10)), 4), np.float32) for _ in range(ROUNDS)]


def test_sixteen_threads_share_a_client(client: ShmClient, path: PathName) -> None:
    def right_answers(caller: int) -> int:
        right = 0
        for x in inputs_of(caller):
            with client.infer("rows", {"X": x}, split=True, path=path) as result:
                right += np.array_equal(result["DOUBLED"], x * 2)
        return right

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        assert list(threads.map(right_answers, range(THREADS))) == [ROUNDS] * THREADS
    all_memory_comes_back(client)


def test_sixteen_threads_have_a_prepared_call_each(client: ShmClient, path: PathName) -> None:
    def right_answers(caller: int) -> int:
        right = 0
        with client.prepare("rows", {"X": ((3, 4), np.float32)}, path=path) as call:
            for turn in range(ROUNDS):
                call.inputs["X"][:] = 100 * caller + turn
                with call.infer() as result:
                    right += bool((result["DOUBLED"] == 2 * (100 * caller + turn)).all())
        return right

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        assert list(threads.map(right_answers, range(THREADS))) == [ROUNDS] * THREADS


def test_sixty_four_tasks_share_a_client(url: str, path: PathName) -> None:
    async def right_answers(client: AsyncShmClient, caller: int) -> int:
        right = 0
        for x in inputs_of(caller):
            with await client.infer("rows", {"X": x}, split=True, path=path) as result:
                right += np.array_equal(result["DOUBLED"], x * 2)
        return right

    async def all_answers(client: AsyncShmClient) -> list[int]:
        return await asyncio.gather(*(right_answers(client, caller) for caller in range(TASKS)))

    with LoopedClient(url, timeout_s=30) as client:
        assert client.run(all_answers(client.aio)) == [ROUNDS] * TASKS
        all_memory_comes_back(client)


def test_results_that_are_held_at_once_are_all_different(any_client: AnyClient, path: PathName) -> None:
    results = [any_client.infer("identity", {"INPUT0": np.full(50, i, np.float32)}, path=path) for i in range(30)]
    assert [set(result["OUTPUT0"].tolist()) for result in results] == [{i} for i in range(30)]
