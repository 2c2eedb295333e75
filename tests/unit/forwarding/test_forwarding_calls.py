"""A model that calls another one, in one process: what is left of such a call when it does not end well."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from shm_backend_utils.model import Call
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.emulated import answered, message_of
from tests.unit.forwarding.two_models import Models, X
from tests.unit.sessions import double
from tests.unit.table_client import Client

SLOTS = 2
KINDS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]


class Server:
    """Brings requests of a model to the other one, as Triton does; but for those that are to fail.

    Attributes
    ----------
    failed : list of InferenceRequest
        So far.
    outcome : subclass of BaseException or InferenceResponse
        What is raised for them, or answered.
    """

    def __init__(self, models: Models) -> None:
        self.failed: list[InferenceRequest] = []
        self.outcome: type[BaseException] | InferenceResponse
        self.deliver = models.execute
        models.execute = self.execute  # type: ignore[method-assign]

    def execute(self, request: InferenceRequest) -> InferenceResponse:
        if not json.loads(request.parameters())["fails"]:
            return self.deliver(request)
        self.failed.append(request)
        if isinstance(self.outcome, type):
            raise self.outcome("no")
        return self.outcome


@pytest.fixture
def server(models: Models) -> Server:
    return Server(models)


def forward(call: Call) -> None:
    target = {"Y": call.output("Y", (4,), np.float32)}
    call.forward("other", {"X": call.input("X")}, target, parameters={"fails": call.parameters["fails"]})


async def forward_async(call: Call) -> None:
    target = {"Y": call.output("Y", (4,), np.float32)}
    await call.forward_async("other", {"X": call.input("X")}, target, parameters={"fails": call.parameters["fails"]})


def requests_of(client: Client) -> list[InferenceRequest]:
    """Return two requests, of which the first one's call of the other model is to fail."""
    return [client.request({"X": X + slot}, {"Y": 16}, slot, fails=1 - slot) for slot in range(2)]


def check_late_request_is_stale(server: Server, client: Client) -> None:
    client.region.bytes()[client.data :] = 7
    assert message_of(server.deliver(server.failed[0])).startswith("shm:stale: ")
    assert set(client.region.bytes()[client.data :].tolist()) == {7}


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, RuntimeError])
def test_what_breaks_off_a_call_of_another_model_fails_one_request_and_the_other_model_refuses_it(
    models: Models, server: Server, client: Client, kind: type[BaseException], side_by_side: bool
) -> None:
    server.outcome = kind
    if side_by_side:
        failed, served = asyncio.run(models.caller.serve_async(requests_of(client), forward_async))
    else:
        failed, served = models.caller.serve(requests_of(client), forward)
    assert kind.__name__ in message_of(failed)
    assert served.error() is None
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert client.is_over(1)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_waits_for_the_other(models: Models, server: Server, client: Client, kind: type[BaseException]) -> None:
    def infer(call: Call) -> None:
        with pytest.raises(kind):
            forward(call)
        call.put("Y", X)  # as if nothing had happened

    server.outcome = kind
    (response,) = models.caller.serve(requests_of(client)[:1], infer)
    assert "model.py has left the call while 1 calls" in message_of(response)
    assert (client.region.record(0).started, client.region.record(0).completed) == (1, 0)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


def test_a_model_may_go_on_without_one_that_is_refused(models: Models, server: Server, client: Client) -> None:
    def infer(call: Call) -> None:
        try:
            forward(call)
        except RuntimeError:
            double(call)

    server.outcome = RuntimeError
    assert [response.error() for response in models.caller.serve(requests_of(client), infer)] == [None, None]
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]


def test_a_request_answered_too_early_is_refused_later(models: Models, server: Server, client: Client) -> None:
    server.outcome = answered([], "not today")
    (response,) = models.caller.serve(requests_of(client)[:1], forward)
    assert "not today" in message_of(response)
    check_late_request_is_stale(server, client)
