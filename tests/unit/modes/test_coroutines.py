"""Requests that are served side by side on an event loop."""

from __future__ import annotations

import asyncio
import time

from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping.mapped import PATIENCE_S
from tests.unit.modes.doubling import Open, X, double
from tests.unit.table_client import Client


def test_requests_are_served_side_by_side_on_the_event_loop(open_session: Open) -> None:
    client = Client(slots=2)
    session = open_session()
    meeting = asyncio.Event()

    async def infer(call: Call) -> None:
        if call.parameters.get("first"):
            await meeting.wait()
        meeting.set()
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, 0, first=True), client.request({"X": X + 1}, {"Y": 16}, 1)]
    responses = asyncio.run(session.serve_async(requests, infer))
    assert [response.error for response in responses] == [None, None]
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert client.is_over(0)
    client.close()


def test_a_coroutine_that_is_cancelled_fails_alone(open_session: Open) -> None:
    client = Client(slots=2)

    async def infer(call: Call) -> None:
        if call.parameters.get("fail"):
            raise asyncio.CancelledError
        await asyncio.sleep(0.01)
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, 0, fail=True), client.request({"X": X}, {"Y": 16}, 1)]
    first, second = asyncio.run(open_session().serve_async(requests, infer))
    assert "CancelledError" in str(first.error)
    assert second.error is None
    assert client.is_over(0)
    assert client.is_over(1)
    client.close()


def test_a_slot_that_is_busy_does_not_hold_the_event_loop(open_session: Open) -> None:
    client = Client(slots=2)
    assert client.region.lease(0).take()
    done: list[float] = []

    async def infer(call: Call) -> None:
        done.append(time.monotonic())
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, slot) for slot in range(2)]
    begin = time.monotonic()
    first, second = asyncio.run(open_session().serve_async(requests, infer))
    assert str(first.error).startswith("shm:busy: ")
    assert second.error is None
    assert done[0] - begin < PATIENCE_S
    client.region.lease(0).give_back()
    client.close()
