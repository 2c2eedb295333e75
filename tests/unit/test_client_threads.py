"""Every way to call a model, from eight threads that give way to each other at nearly every step."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

THREADS = 8
ROUNDS = 60
FRAMES = 6
Call = Callable[[ShmClient, np.random.Generator, int], None]


pytestmark = pytest.mark.usefixtures("switching_often")


def compute(order: Order, inputs: Arrays) -> Any:
    if order.model == "stream":
        return ({"OUT0": inputs["IN0"] * factor} for factor in range(FRAMES))
    return {"OUT0": inputs["IN0"] * 2}


@pytest.fixture(params=["grpc", "http"])
def server_and_protocol(request: pytest.FixtureRequest) -> Iterator[tuple[FakeServer, str]]:
    decoupled = config("stream", model_transaction_policy={"decoupled": True})
    batches = config("batches", max_batch_size=8, dynamic_batching={})
    with FakeServer(config("m"), batches, decoupled, compute=compute) as server:
        yield server, request.param


def numbers(random: np.random.Generator) -> Any:
    """Return an array of a size of its own, with contents of its own."""
    return random.random(int(random.integers(1, 3000)), dtype=np.float32)


def infer(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = numbers(random)
    path: Any = ["auto", "direct", "triton-shm", "inline"][number % 4]
    hint: Any = [None, {"OUT0": given.nbytes}][number % 2]
    np.testing.assert_array_equal(client.infer("m", {"IN0": given}, path=path, outputs=hint)["OUT0"], given * 2)


def submit(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = [numbers(random) for _ in range(3)]
    futures = []
    for each in given:
        mine = each.copy()
        futures.append(client.submit("m", {"IN0": mine}))
        mine.fill(-1)
    if number % 3 == 0:
        futures[0].cancel()
    for each, future in zip(given, futures, strict=True):
        if not future.cancelled():
            np.testing.assert_array_equal(future.result(60)["OUT0"], each * 2)


def prepare(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = numbers(random)
    with client.prepare("m", {"IN0": (given.shape, np.float32)}, outputs={"OUT0": given.nbytes}) as call:
        for factor in (1, 2):
            np.multiply(given, factor, out=call.inputs["IN0"])
            np.testing.assert_array_equal(call.infer()["OUT0"], given * factor * 2)


def side_by_side(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = random.random((1 + number % 3, 100), dtype=np.float32)
    np.testing.assert_array_equal(client.infer("batches", {"IN0": given})["OUT0"], given * 2)


def split(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = random.random((20, 50), dtype=np.float32)
    np.testing.assert_array_equal(client.infer("batches", {"IN0": given}, split=True)["OUT0"], given * 2)


def stream(client: ShmClient, random: np.random.Generator, number: int) -> None:
    given = numbers(random)
    for index, result in enumerate(client.stream("stream", {"IN0": given}, outputs={"OUT0": given.nbytes}, frames=2)):
        np.testing.assert_array_equal(result["OUT0"], given * index)
        del result


CALLS = [infer, submit, prepare, side_by_side, split]
CASES = [(protocol, call) for protocol in ("grpc", "http") for call in CALLS] + [("grpc", stream)]


@pytest.mark.parametrize(
    ("server_and_protocol", "call"),
    CASES,
    indirect=["server_and_protocol"],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_every_answer_is_the_callers_own(server_and_protocol: tuple[FakeServer, str], call: Call) -> None:
    server, protocol = server_and_protocol
    rounds = ROUNDS if call in (infer, prepare, side_by_side) else ROUNDS // 4

    with client_of(server, protocol, pool=PoolOptions(max_bytes=40 * 16 * PAGE_SIZE)) as client:

        def work(seed: int) -> int:
            random = np.random.default_rng(seed)
            for number in range(rounds):
                call(client, random, number)
            return rounds

        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            assert list(threads.map(work, range(THREADS))) == [rounds] * THREADS
        stats = client.stats()
        assert (stats.slots_held, stats.quarantined, stats.failures) == (0, 0, 0)


def test_calls_of_every_kind_at_once(server_and_protocol: tuple[FakeServer, str]) -> None:
    server, protocol = server_and_protocol
    kinds = [infer, submit, prepare, side_by_side, split, infer, submit, prepare if protocol == "http" else stream]
    with client_of(server, protocol, pool=PoolOptions(max_bytes=40 * 16 * PAGE_SIZE)) as client:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for number in range(ROUNDS // 4):
                kinds[seed % len(kinds)](client, random, number)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        assert (client.stats().slots_held, client.stats().failures) == (0, 0)


def test_every_answer_is_the_tasks_own(server_and_protocol: tuple[FakeServer, str]) -> None:
    server, protocol = server_and_protocol

    async def work(client: AsyncShmClient, seed: int) -> None:
        random = np.random.default_rng(seed)
        for number in range(ROUNDS // 2):
            given = numbers(random)
            if number % 3 == 0:
                task = client.submit("m", {"IN0": given})
                if number % 2:
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    continue
                result = await task
            elif number % 3 == 1:
                with await client.prepare("m", {"IN0": (given.shape, np.float32)}) as call:
                    call.inputs["IN0"][:] = given
                    result = await call.infer()
            else:
                result = await client.infer("m", {"IN0": given})
            np.testing.assert_array_equal(result["OUT0"], given * 2)

    async def main() -> None:
        async with async_client_of(server, protocol, pool=PoolOptions(max_bytes=40 * 16 * PAGE_SIZE)) as client:
            await asyncio.gather(*[work(client, seed) for seed in range(THREADS)])
            await asyncio.sleep(0.1)
            stats = client.stats()
            assert (stats.slots_held, stats.quarantined) == (0, 0)

    asyncio.run(main())
