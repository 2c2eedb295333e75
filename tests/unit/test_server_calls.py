"""What a client asks of its server beside inference: the same for both clients, over both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from shm_backend_utils.client import AsyncShmClient, ShmClient, aio, client
from shm_backend_utils.client.errors import (
    DeadlineExceededError,
    InferenceError,
    ServerUnavailableError,
    TimeoutValueError,
)
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import AsyncFakeTransport, FakeTransport

URL: Final = "localhost:8001"
Call = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("b", max_batch_size=8)) as server:
        yield server


@pytest.fixture
def protocol(protocol: str, monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> str:
    monkeypatch.setattr(client, "connect", lambda *_: FakeTransport(server, protocol))
    monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, protocol))
    return protocol


@pytest.fixture(params=["threads", "tasks"])
def call(request: pytest.FixtureRequest, protocol: str) -> Call:

    def in_thread(method: str, *values: Any, wait_ready_s: float | None = None, **named: Any) -> Any:
        with ShmClient(URL, wait_ready_s=wait_ready_s) as made:
            return getattr(made, method)(*values, **named)

    async def in_task(method: str, *values: Any, wait_ready_s: float | None = None, **named: Any) -> Any:
        async with AsyncShmClient(URL, wait_ready_s=wait_ready_s) as made:
            return await getattr(made, method)(*values, **named)

    if request.param == "threads":
        return in_thread
    return lambda *values, **named: asyncio.run(in_task(*values, **named))


@pytest.mark.parametrize("question", ["live", "ready"])
def test_a_server_says_whether_it_is_live_and_ready(server: FakeServer, call: Call, question: str) -> None:
    assert call(f"is_server_{question}") is True
    setattr(server, f"is_{question}", False)
    assert call(f"is_server_{question}") is False


def test_a_model_is_ready_if_its_session_refuses_what_is_no_slot(server: FakeServer, call: Call) -> None:
    assert call("is_model_ready", "m") is True
    assert call("is_model_ready", "b", "1") is True
    assert [(order.model, list(order.inputs)) for order in server.orders] == [("m", []), ("b", ["SHM"])]
    assert call("is_model_ready", "nobody") is False


@pytest.mark.parametrize(("pinned", "asked"), [(-1, ""), (2, "2")])
def test_an_ensembles_step_has_its_version(server: FakeServer, call: Call, pinned: int, asked: str) -> None:
    steps = {"step": [{"model_name": "m", "model_version": pinned}]}
    server.configs["whole"] = config("whole", platform="ensemble", ensemble_scheduling=steps)
    assert call("is_model_ready", "whole") is True
    assert [(order.model, order.version) for order in server.orders] == [("m", asked)]


DEAD = "Failed to process the request(s) for model instance 'm_0_0', message: Stub process 'm_0_0' is not healthy."
RESTARTED = "Stub process is unhealthy and it will be restarted."
DECOUPLED = "doesn't support models with decoupled transaction policy"


@pytest.mark.parametrize(
    ("said", "status", "is_ready"),
    [
        *((dead, "StatusCode.INTERNAL", False) for dead in (DEAD, RESTARTED)),
        (DECOUPLED, "StatusCode.UNIMPLEMENTED", True),
    ],
    ids=["dead", "restarted", "does not tell"],
)
def test_a_dead_model_is_not_ready(server: FakeServer, call: Call, said: str, status: str, is_ready: bool) -> None:
    def refuse(_: Order) -> None:
        raise InferenceError(said, status)

    server.before = refuse
    assert call("is_model_ready", "m") is is_ready
    server.configs["m"]["parameters"] = {}  # it has no session, and so gets no request
    assert call("is_model_ready", "m") is True


def test_a_model_that_does_not_answer_is_neither(server: FakeServer, call: Call) -> None:
    def refuse(_: Order) -> None:
        raise DeadlineExceededError("no answer", "StatusCode.DEADLINE_EXCEEDED")

    server.before = refuse
    with pytest.raises(DeadlineExceededError):
        call("is_model_ready", "m")


def test_streams_ask_decoupled(server: FakeServer, call: Call, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Order) -> Iterator[Any]:
        raise InferenceError("Stub process 'd_0_0' is not healthy.", "StatusCode.INTERNAL")

    server.configs["d"] = config("d", model_transaction_policy={"decoupled": True})
    monkeypatch.setattr(server, "stream", die)
    assert call("is_model_ready", "d") is (protocol == "http")


def test_a_model_is_unloaded_alone_or_with_its_dependents(server: FakeServer, call: Call) -> None:
    call("unload_model", "m")
    call("unload_model", "m", unload_dependents=True)
    assert server.unloads == [("m", False), ("m", True)]


class Refusing(list[Any]):
    """What a server keeps of the models that it is told to load, if it loads none."""

    SAID: Final = "explicit model load / unload is not allowed if polling is enabled"

    def append(self, _: object) -> None:
        raise InferenceError(self.SAID, "StatusCode.UNAVAILABLE")


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
def test_a_server_that_loads_nothing_is_explained(server: FakeServer, call: Call, method: str) -> None:
    server.loads = server.unloads = Refusing()
    with pytest.raises(InferenceError, match=f"start it with --model-control-mode=explicit .{Refusing.SAID}") as error:
        call(method, "m")
    assert error.value.status() == "StatusCode.UNAVAILABLE"


def test_both_clients_offer_the_same() -> None:
    def offered(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert offered(ShmClient) == offered(AsyncShmClient)


class Starting:
    def __init__(self, server: FakeServer, ups: int, readies: int) -> None:
        self.asked = 0
        self._server, self._ups, self._readies = server, ups, readies

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeTransport, "send", lambda transport, message, _: self._send(transport, message))

    def _send(self, transport: FakeTransport, message: Any) -> Any:
        self.asked += 1
        if self.asked <= self._ups:
            raise ServerUnavailableError("no Triton server answers", "StatusCode.UNAVAILABLE")
        self._server.is_ready = self.asked > self._ups + self._readies
        return transport._wire(self._server, message)


@pytest.mark.parametrize(("ups", "readies"), [(0, 0), (3, 0), (0, 3), (2, 2)])
def test_a_client_waits_until_its_server_is_up_and_ready(
    server: FakeServer, call: Call, monkeypatch: pytest.MonkeyPatch, ups: int, readies: int
) -> None:
    starting = Starting(server, ups, readies)
    starting.patch(monkeypatch)
    assert call("is_server_ready", wait_ready_s=60.0) is True
    assert starting.asked == ups + readies + 2


@pytest.mark.parametrize(
    ("ups", "readies", "words"), [(10**9, 0, "no Triton server answers"), (0, 10**9, "it is not ready")]
)
def test_it_does_not_wait_for_longer_than_it_was_told_and_by_default_not_at_all(
    server: FakeServer, call: Call, monkeypatch: pytest.MonkeyPatch, ups: int, readies: int, words: str
) -> None:
    starting = Starting(server, ups, readies)
    starting.patch(monkeypatch)
    with pytest.raises(ServerUnavailableError, match=words):
        call("is_server_ready", wait_ready_s=0.35)
    assert starting.asked > 1
    at_once = Starting(server, 1, 0)
    at_once.patch(monkeypatch)
    with pytest.raises(ServerUnavailableError):
        call("is_server_ready")
    assert at_once.asked == 1


@pytest.mark.parametrize("wait_ready_s", [0, -1, "3"])
def test_a_time_that_is_none_is_refused(call: Call, wait_ready_s: Any) -> None:
    with pytest.raises(TimeoutValueError, match="wait_ready_s is"):
        call("is_server_ready", wait_ready_s=wait_ready_s)
