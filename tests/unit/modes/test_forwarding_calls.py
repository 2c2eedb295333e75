"""A model that calls another one, in one process: what is left of such a call when it does not end well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.forward.forwarder import ModelSpecs
from shm_backend_utils.model.forward.ordinary import OtherModel
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.testing.emulator import sent_outputs
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.emulated import answered, arrived, message_of
from tests.unit.modes.doubling import Open, X
from tests.unit.sessions import double, session_of, tensor
from tests.unit.table_client import Client

SLOTS = 2
KINDS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]
OTHER = {
    "name": "other",
    "input": [tensor("X")],
    "output": [tensor("Y")],
    "parameters": {"SHM_PATHS": {"string_value": "direct"}},
}


class Server:
    """Brings requests of a model to the other one, as Triton does; or fails to.

    Attributes
    ----------
    sent : list of InferenceRequest
        So far.
    before : callable
        Done before a request gets to the other model; may raise.
    """

    def __init__(self, other: ShmSession) -> None:
        self.sent: list[InferenceRequest] = []
        self.before: Callable[[], object] = lambda: None
        self._other = other

    def execute(self, backend: TritonBackend, request: InferenceRequest) -> InferenceResponse:
        self.sent.append(request)
        self.before()
        return self.deliver(request)

    async def execute_async(self, backend: TritonBackend, request: InferenceRequest) -> InferenceResponse:
        self.sent.append(request)
        await asyncio.sleep(0)
        self.before()
        await asyncio.sleep(0.01)
        return self.deliver(request)

    def deliver(self, request: InferenceRequest) -> InferenceResponse:
        (response,) = self._other.serve([arrived(request)], double)
        return answered(sent_outputs(response), message_of(response))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], name="other") as other:
        server = Server(other)
        for name in ("execute", "execute_async"):
            method = getattr(server, name)
            monkeypatch.setattr(TritonBackend, name, lambda *arguments, method=method: method(*arguments))
        monkeypatch.setattr(ModelSpecs, "model", lambda *_: OtherModel(ModelSpec.from_config(OTHER)))
        yield server


@pytest.fixture
def session(open_session: Open, server: Server) -> ShmSession:
    return open_session()


def forward(call: Call) -> None:
    call.forward("other", {"X": call.input("X")}, {"Y": call.output("Y", (4,), np.float32)})


async def forward_async(call: Call) -> None:
    await call.forward_async("other", {"X": call.input("X")}, {"Y": call.output("Y", (4,), np.float32)})


def requests_of(client: Client) -> list[InferenceRequest]:
    return [client.request({"X": X + slot}, {"Y": 16}, slot) for slot in range(2)]


def serve(session: ShmSession, client: Client, *, side_by_side: bool) -> list[InferenceResponse]:
    if side_by_side:
        return asyncio.run(session.serve_async(requests_of(client), forward_async))
    return session.serve(requests_of(client), forward)


def check_late_request_is_stale(server: Server, client: Client) -> None:
    """Have a request that got no answer arrive after all."""
    client.region.bytes()[client.data :] = 7
    late = server.deliver(server.sent[0])
    assert message_of(late).startswith("shm:stale: ")
    assert set(client.region.bytes()[client.data :].tolist()) == {7}


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, RuntimeError])
def test_what_breaks_off_a_call_of_another_model_fails_one_request_and_the_other_model_refuses_it(
    session: ShmSession, server: Server, client: Client, kind: type[BaseException], side_by_side: bool
) -> None:
    waiting = [kind("no")]

    def break_off() -> None:
        if waiting:
            raise waiting.pop()

    server.before = break_off
    failed, served = serve(session, client, side_by_side=side_by_side)
    assert kind.__name__ in message_of(failed)
    assert served.error() is None
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert client.is_over(1)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_not_the_clients_while_another_model_may_be_at_work_there(
    session: ShmSession, server: Server, client: Client, kind: type[BaseException]
) -> None:
    def infer(call: Call) -> None:
        try:
            forward(call)
        except kind:
            call.put("Y", X)  # as if nothing had happened

    def break_off() -> None:
        raise kind("no")

    server.before = break_off
    (response,) = session.serve(requests_of(client)[:1], infer)
    assert "model.py has left the call while 1 calls" in message_of(response)
    assert (client.region.record(0).started, client.region.record(0).completed) == (1, 0)
    assert client.is_free(0)
    check_late_request_is_stale(server, client)


def test_a_model_may_go_on_without_one_that_is_refused(session: ShmSession, server: Server, client: Client) -> None:
    def infer(call: Call) -> None:
        try:
            forward(call)
        except RuntimeError:
            double(call)

    def refuse() -> None:
        raise RuntimeError("the model is not ready")

    server.before = refuse
    responses = session.serve(requests_of(client), infer)
    assert [response.error() for response in responses] == [None, None]
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]


def test_a_request_answered_too_early_is_refused_later(session: ShmSession, server: Server, client: Client) -> None:
    deliver = server.deliver
    server.deliver = lambda request: answered([], "not today")  # type: ignore[method-assign]
    (response,) = session.serve(requests_of(client)[:1], forward)
    assert "not today" in message_of(response)
    server.deliver = deliver  # type: ignore[method-assign]
    check_late_request_is_stale(server, client)
