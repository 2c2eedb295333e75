"""Large inputs are copied in another thread than that of the event loop, whatever they are copied for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, InferenceError
from shm_backend_utils.client.inputs.sources import Source
from shm_backend_utils.errors import SlotInUseError
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import async_client_of

LARGE = np.zeros(2**21, np.float32)
SMALL = np.zeros(2**4, np.float32)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each copy that was made was made in the event loop's thread."""
    found: list[bool] = []
    write = Source.write_to

    def noting(source: Source, target: np.ndarray[Any, Any]) -> None:
        found.append(threading.current_thread() is threading.main_thread())
        write(source, target)

    monkeypatch.setattr(Source, "write_to", noting)
    return found


async def infer(client: AsyncShmClient, x: np.ndarray[Any, Any]) -> None:
    (await client.infer("m", {"IN0": x})).release()


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
def test_the_inputs_of_a_call(threads: list[bool], x: np.ndarray[Any, Any]) -> None:
    async def work() -> None:
        with FakeServer(config("m")) as server:
            async with async_client_of(server) as client:
                await infer(client, x)

    asyncio.run(work())
    assert threads == [x is SMALL]


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
def test_the_inputs_of_a_call_that_is_sent_again(threads: list[bool], x: np.ndarray[Any, Any]) -> None:
    async def work() -> None:
        with FakeServer(config("m")) as server:

            def refuse_the_first(order: Order) -> None:
                if len(server.orders) == 1:
                    raise InferenceError(refusal(SlotInUseError("the slot is in use")), "StatusCode.CANCELLED")

            server.before = refuse_the_first
            async with async_client_of(server) as client:
                await infer(client, x)

    asyncio.run(work())
    assert threads == [x is SMALL, x is SMALL]


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
def test_the_inputs_of_a_stream(threads: list[bool], x: np.ndarray[Any, Any]) -> None:
    def frames(order: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield {"OUT0": np.ones(1, np.float32)}

    async def work() -> None:
        decoupled = config("m", model_transaction_policy={"decoupled": True})
        with FakeServer(decoupled, compute=frames) as server:
            async with async_client_of(server) as client:
                async for result in client.stream("m", {"IN0": x}):
                    result.release()

    asyncio.run(work())
    assert threads == [x is SMALL]
