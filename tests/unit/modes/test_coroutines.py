"""Requests that are served side by side on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model import Call
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import message_of
from tests.unit.fake_gpu import runtime_that_gives_all_back
from tests.unit.modes.doubling import Open, X, double
from tests.unit.table_client import Client

SLOTS = 3


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=SLOTS)
    yield client
    client.close()


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


def requests_of(client: Client, **parameters: Any) -> list[InferenceRequest]:
    """Return a request for each slot; the parameters are the first one's."""
    return [client.request({"X": X + slot}, {"Y": 16}, slot, **({} if slot else parameters)) for slot in range(SLOTS)]


def are_over(client: Client) -> bool:
    return all(client.is_over(slot) for slot in range(SLOTS))


def test_requests_are_served_side_by_side_on_the_event_loop(open_session: Open, client: Client) -> None:
    session = open_session()
    meeting = asyncio.Event()

    async def infer(call: Call) -> None:
        if call.parameters.get("first"):
            await meeting.wait()
        meeting.set()
        double(call)

    responses = asyncio.run(session.serve_async(requests_of(client, first=True), infer))
    assert [response.error() for response in responses] == [None] * SLOTS
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert are_over(client)


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


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a while"])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_what_a_coroutine_raises_fails_it_alone_and_the_others_are_over_when_execute_is(
    open_session: Open, client: Client, kind: type[BaseException], late: bool
) -> None:
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


def test_when_execute_is_cancelled_all_coroutines_are_over_and_their_slots_free(
    open_session: Open, client: Client, cuda: CudaRuntime
) -> None:
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
