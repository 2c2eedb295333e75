"""Requests side by side on an event loop; and whatever a model raises, in any mode, is the error of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import BatchCall, Call, StreamCall
from shm_backend_utils.protocol.spans import Ring
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import answers_to, message_of
from tests.unit.modes.conftest import Open, X, batched, carrier_of, streaming
from tests.unit.sessions import double
from tests.unit.table_client import Client

SLOTS = 3


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=2 * SLOTS)  # a ring for each
    yield client
    client.close()


def requests_of(client: Client, failing: int = 0, **parameters: Any) -> list[InferenceRequest]:
    """Return one for each slot; the failing one has the parameters."""
    return [
        client.request({"X": X + slot}, {"Y": 16}, slot, **(parameters if slot == failing else {}))
        for slot in range(SLOTS)
    ]


def are_over(client: Client) -> bool:
    return all(client.is_over(slot) for slot in range(SLOTS))


def test_a_call_is_over_when_its_own_coroutine_is(open_session: Open, client: Client) -> None:
    session = open_session()
    over: list[bool] = []

    async def infer(call: Call) -> None:
        double(call)
        if call.parameters.get("first"):
            for _ in range(10):
                await asyncio.sleep(0)  # the others need one turn
            over.extend(client.is_over(slot) for slot in range(SLOTS))

    asyncio.run(session.serve_async(requests_of(client, first=True), infer))
    assert over == [False, True, True]
    assert are_over(client)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_a_coroutine_fails_alone(open_session: Open, client: Client, kind: type[BaseException], late: bool) -> None:
    async def infer(call: Call) -> None:
        if call.parameters.get("fail"):
            if late:
                await asyncio.sleep(0.001)
            raise kind
        await asyncio.sleep(0.02)
        double(call)

    async def execute() -> list[Any]:
        responses = await open_session().serve_async(requests_of(client, fail=True), infer)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return responses

    first, *others = asyncio.run(execute())
    assert kind.__name__ in message_of(first)
    assert [response.error() for response in others] == [None] * (SLOTS - 1)
    assert [client.output("Y", slot).tolist() for slot in (1, 2)] == [[2, 4, 6, 8], [4, 6, 8, 10]]
    assert are_over(client)


def test_when_execute_is_cancelled_coroutines_are_over(open_session: Open, client: Client, cuda: CudaRuntime) -> None:
    session = open_session(cuda=CudaAccess(lambda: cuda))
    ended: list[str] = []

    async def infer(call: Call) -> None:
        if call.parameters.get("gpu"):  # it is done, and waits for its GPU
            double(call)
            call.ready_on(0)
            return
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # it has to clean up
            ended.append("cleaned up")

    async def execute() -> None:
        served = asyncio.ensure_future(session.serve_async(requests_of(client, gpu=True), infer))
        await asyncio.sleep(0.01)
        served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await served
        assert ended == ["cleaned up"] * (SLOTS - 1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(execute())
    assert are_over(client)
    assert client.output("Y").tolist() == [0, 2, 4, 6]
    assert not client.has_results(1)
    session.close()  # it keeps idle streams and events


def test_when_execute_is_cancelled_at_once_no_slot_is_held(open_session: Open, client: Client) -> None:
    async def execute() -> None:
        served = asyncio.ensure_future(open_session().serve_async(requests_of(client), lambda call: asyncio.sleep(60)))
        await asyncio.sleep(0)
        served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await served

    asyncio.run(execute())
    assert all(client.is_free(slot) for slot in range(SLOTS))


def test_slots_that_are_busy_hold_neither_the_event_loop_nor_the_others(open_session: Open, client: Client) -> None:
    assert client.region.lease(0).take()
    requests = requests_of(client)
    begin = time.monotonic()

    async def infer(call: Call) -> None:
        double(call)

    *busy, served, _ = asyncio.run(open_session().serve_async([requests[0]] * 100 + requests[1:], infer))
    assert time.monotonic() - begin < 5  # 50 ms for each of them would be too long
    assert all(message_of(response).startswith("shm:busy: ") for response in busy)
    assert served.error() is None
    client.region.lease(0).give_back()


KINDS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, RuntimeError]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", range(SLOTS))
def test_one_after_another(open_session: Open, client: Client, kind: type[BaseException], failing: int) -> None:
    def infer(call: Call) -> None:
        double(call)
        if call.parameters.get("fail"):
            raise kind("no")

    session = open_session()
    responses = session.serve(requests_of(client, failing, fail=True), infer)
    assert kind.__name__ in message_of(responses[failing])
    assert are_over(client)
    for slot in {*range(SLOTS)} - {failing}:
        assert client.output("Y", slot).tolist() == (2 * (X + slot)).tolist()
    assert not client.has_results(failing)
    again = session.serve(requests_of(client), infer)
    assert [response.error() for response in again] == [None] * SLOTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", range(SLOTS))
def test_in_batches_of_two_kinds(open_session: Open, client: Client, kind: type[BaseException], failing: int) -> None:
    def infer(batch: BatchCall) -> None:
        x = batch.input("X")
        np.multiply(x.numpy(), 2, out=batch.output("Y", x.shape[1:], x.dtype).numpy())
        if x.shape[1] == 5:
            raise kind("no")

    rows = [np.ones((1, 5 if slot == failing else 4), np.float32) for slot in range(SLOTS)]
    requests = [client.request({"X": x}, {"Y": 20}, slot, delivered=carrier_of(1)) for slot, x in enumerate(rows)]
    responses = batched(open_session).serve_batch(requests, infer)
    for slot, response in enumerate(responses):
        assert (kind.__name__ in message_of(response)) == (slot == failing)
        assert client.is_over(slot)
        if slot != failing:
            assert client.output("Y", slot).tolist() == [[2] * 4]


@pytest.mark.parametrize("has_ring", [False, True])
@pytest.mark.parametrize("count", [1, SLOTS])
@pytest.mark.parametrize("is_generator", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_streams_side_by_side(
    open_session: Open, client: Client, kind: type[BaseException], count: int, is_generator: bool, has_ring: bool
) -> None:
    def plain(call: StreamCall) -> None:
        double(call)
        call.send()
        if call.parameters.get("fail"):
            raise kind("no")

    def generator(call: StreamCall) -> Iterator[None]:
        double(call)
        yield
        if call.parameters.get("fail"):
            raise kind("no")

    rings = [Ring(SLOTS + slot, 1, 1024) if has_ring else None for slot in range(count)]
    requests = [
        client.request({"X": X + slot}, {"Y": 16}, slot, ring=ring, fail=slot == count - 1)
        for slot, ring in enumerate(rings)
    ]
    streaming(open_session).serve_streams(requests, generator if is_generator else plain)
    for slot, request in enumerate(requests):
        frame, last = answers_to(request).sent
        assert frame is not None
        assert frame.error() is None
        assert answers_to(request).is_over
        if slot == count - 1:
            # Python turns a generator's StopIteration into a RuntimeError.
            assert kind.__name__ in message_of(last)
        else:
            assert last is None
        assert client.is_over(slot)


def test_when_a_generator_raises_something_else_as_it_is_closed(open_session: Open, client: Client) -> None:
    def answer(call: StreamCall) -> Iterator[None]:
        try:
            call.put("Y", np.ones(9, np.int64))
            yield
        finally:
            raise SystemExit("while it is closed")

    requests = [client.request({"X": X}, {"Y": 16}, slot) for slot in range(2)]
    streaming(open_session).serve_streams(requests, answer)
    for slot, request in enumerate(requests):
        assert "SystemExit: while it is closed" in message_of(answers_to(request).sent[-1])
        assert client.is_over(slot)
