"""Large inputs are copied in another thread than that of the event loop, whatever they are copied for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, InferenceError
from shm_backend_utils.client.paths.direct import DirectCall
from shm_backend_utils.client.paths.triton_shm import InlineCall, RegisteredCall
from shm_backend_utils.client.streams import DirectStream
from shm_backend_utils.errors import SlotInUseError
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import Arrays, FakeServer, Order, config, doubled
from tests.unit.fake_wires import async_client_of

LARGE = np.zeros(2**21, np.float32)
SMALL = np.zeros(2**4, np.float32)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each copy that was made was made in the event loop's thread."""
    found: list[bool] = []
    copy = np.copyto

    def noting(*arguments: Any, **named: Any) -> None:
        found.append(threading.current_thread() is threading.main_thread())
        copy(*arguments, **named)

    monkeypatch.setattr(np, "copyto", noting)
    return found


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["call", "sent again", "stream"])
def test_large_inputs_are_copied_in_another_thread(threads: list[bool], x: np.ndarray[Any, Any], kind: str) -> None:
    def frames(order: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield {"OUT0": np.ones(1, np.float32)}

    def refuse_the_first(order: Order) -> None:
        if kind == "sent again" and len(server.orders) == 1:
            raise InferenceError(refusal(SlotInUseError("the slot is in use")), "StatusCode.CANCELLED")

    async def work() -> None:
        async with async_client_of(server) as client:
            if kind == "stream":
                async for result in client.stream("m", {"IN0": x}):
                    result.release()
            else:
                (await client.infer("m", {"IN0": x})).release()

    described = config("m", model_transaction_policy={"decoupled": kind == "stream"})
    with FakeServer(described, compute=frames if kind == "stream" else doubled) as server:
        server.before = refuse_the_first
        asyncio.run(work())
    assert threads == [x is SMALL] * (2 if kind == "sent again" else 1)


CALLS: dict[str, Any] = {
    "direct": DirectCall,
    "triton-shm": RegisteredCall,
    "inline": InlineCall,
    "stream": DirectStream,
}


@pytest.mark.parametrize("path", CALLS)
def test_a_call_that_is_given_up_meanwhile(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread finds the call closed between two of its inputs, and fails at nothing; the memory comes back."""
    begun, is_given_up, is_over = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    copy, write = np.copyto, CALLS[path].write

    def slow(*arguments: Any, **named: Any) -> None:
        copy(*arguments, **named)
        begun.set()
        assert is_given_up.wait(30)

    def noting(call: Any, given: Any) -> None:
        try:
            write(call, given)
        except BaseException as error:
            errors.append(error)
        finally:
            is_over.set()

    async def call(client: AsyncShmClient) -> None:
        inputs = {"IN0": LARGE, "IN1": LARGE}
        if path == "stream":
            async for _ in client.stream("m", inputs):
                raise AssertionError
        else:
            await client.infer("m", inputs, path=cast(Any, path))

    async def work() -> None:
        policy = {"decoupled": path == "stream"}
        with FakeServer(config("m", count=2, model_transaction_policy=policy)) as server:
            async with async_client_of(server) as client:
                task = asyncio.ensure_future(call(client))
                assert await asyncio.to_thread(begun.wait, 30)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                is_given_up.set()
                assert await asyncio.to_thread(is_over.wait, 30)
                while client.stats().slots_held or client.stats().quarantined:
                    await asyncio.sleep(0.001)

    monkeypatch.setattr(np, "copyto", slow)
    monkeypatch.setattr(CALLS[path], "write", noting)
    asyncio.run(work())
    assert errors == []
