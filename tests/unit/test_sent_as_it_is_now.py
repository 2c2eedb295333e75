"""What a call sends is what its arguments say at that moment; and what a client asks of its server beside inference."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.client import AsyncShmClient, ShmClient, aio
from shm_backend_utils.client import client as client_module
from shm_backend_utils.client.errors import (
    DeadlineExceededError,
    InferenceError,
    ServerUnavailableError,
    TimeoutValueError,
)
from shm_backend_utils.errors import SlotInUseError, refusal
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from shm_backend_utils.testing import emulator
from tests.unit.fake_server import Arrays, FakeServer, Order, config, doubled
from tests.unit.fake_wires import AsyncFakeTransport, FakeTransport, async_client_of, client_of

URL: Final = "localhost:8001"
Call = Callable[..., Any]
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("b", max_batch_size=8)) as server:
        yield server


@pytest.fixture
def protocol(protocol: str, monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> str:
    monkeypatch.setattr(client_module, "connect", lambda *_: FakeTransport(server, protocol))
    monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, protocol))
    return protocol


@pytest.fixture
def client(server: FakeServer, protocol: str) -> Iterator[ShmClient]:
    with client_of(server, protocol) as client:
        yield client


def users(order: Order) -> list[tuple[str, type, Any]]:
    ours = (SLOT_PARAMETER, GENERATION_PARAMETER)
    return [(name, type(value), value) for name, value in order.parameters.items() if name not in ours]


def token(order: Order) -> str:
    found: str = {name.lower(): value for name, value in order.headers.items()}["token"]
    return found


def test_what_changes_between_calls_is_sent_as_it_is(client: ShmClient, server: FakeServer, path: Any) -> None:
    parameters: dict[str, Any] = {"answer": 1}
    headers, array = {"token": "0"}, X.copy()
    server.before = lambda _: array.fill(-1)
    for round_, value in enumerate((1, 1.0, True, "1", 2, 1)):
        parameters["answer"], headers["token"] = value, str(round_)
        array[:] = X
        result = client.infer("m", {"IN0": array}, parameters=parameters, headers=headers, path=path)
        assert users(server.orders[-1]) == [("answer", type(value), value)]
        assert token(server.orders[-1]) == str(round_)
        np.testing.assert_array_equal(result["OUT0"], 2 * X)  # though it changed while the model executed
    client.infer("m", {"IN0": X}, parameters={"a": 1}, queue_timeout_us=1000, headers={"token": "x"}, outputs=["OUT0"])
    assert {name: value for name, _, value in users(server.orders[-1])} == {"a": 1, "timeout": 1000}
    client.infer("m", {"IN0": X}, path=path)
    assert users(server.orders[-1]) == []
    assert "token" not in {name.lower() for name in server.orders[-1].headers}
    assert path == "triton-shm" or server.orders[-1].outputs is None
    if path == "direct":
        named = [(order.parameters[SLOT_PARAMETER], order.parameters[GENERATION_PARAMETER]) for order in server.orders]
        assert len(set(named)) == len(named), "every request has a generation of its own"


def test_what_changes_after_submit_has_returned_is_not_sent(client: ShmClient, server: FakeServer) -> None:
    go = threading.Event()
    server.before = lambda _: (go.wait(30), None)[1]
    array, inputs = X.copy(), {}
    inputs["IN0"] = array
    parameters, headers = {"answer": 1}, {"token": "old"}
    future = client.submit("m", inputs, parameters=parameters, headers=headers)
    array[:] = -1
    inputs.clear()
    parameters["answer"], headers["token"] = 2, "new"
    go.set()
    np.testing.assert_array_equal(future.result(30)["OUT0"], 2 * X)
    assert users(server.orders[-1]) == [("answer", int, 1)]
    assert token(server.orders[-1]) == "old"


def test_what_changes_after_prepare_but_for_the_inputs_is_not_sent(client: ShmClient, server: FakeServer) -> None:
    parameters, described = {"answer": 1}, {"IN0": ((4,), np.float32)}
    with client.prepare("m", described, parameters=parameters) as call:
        parameters["answer"] = 2
        described.clear()
        for factor in (1, 3):
            call.inputs["IN0"][:] = factor * X
            np.testing.assert_array_equal(call.infer()["OUT0"], 2 * factor * X)
        assert [users(order) for order in server.orders] == [[("answer", int, 1)]] * 2


def test_outputs_by_name_and_all_outputs_are_told_apart_also_side_by_side(server: FakeServer, protocol: str) -> None:
    server.configs["m"] = config("m", max_batch_size=8, dims="4", dynamic_batching={})
    server.configs["m"]["output"].append({"name": "OUT1", "data_type": "TYPE_INVALID", "dims": ["4"]})

    def compute(_: Order, inputs: Arrays) -> Arrays:
        return {"OUT0": inputs["IN0"] * 2, "OUT1": inputs["IN0"] * 3}

    server.compute = compute
    rows = X.reshape(1, 4)
    with client_of(server, protocol) as client:
        held: list[Any] = []
        for _ in range(3):  # they are held, so that they lie side by side
            held.append(client.infer("m", {"IN0": rows}, outputs=["OUT0"]))
            assert server.orders[-1].outputs == {"OUT0": None}
            held.append(client.infer("m", {"IN0": rows}))
            assert server.orders[-1].outputs is None
        assert [sorted(result) for result in held] == [["OUT0"], ["OUT0", "OUT1"]] * 3


def test_tasks_send_what_their_arguments_say(server: FakeServer, protocol: str) -> None:
    async def main() -> None:
        async with async_client_of(server, protocol) as client:
            parameters: dict[str, Any] = {}
            for value in (1, 1.0, True):
                parameters["answer"] = value
                waiting = client.infer("m", {"IN0": X}, parameters=parameters)
                parameters["answer"] = "changed before the first await"
                await waiting
                assert users(server.orders[-1]) == [("answer", type(value), value)]

    asyncio.run(main())


PACKAGE = str(Path(shm_backend_utils.__file__).parent)
EMULATOR = str(Path(emulator.__file__).parent)
MOST = 25
LONG = np.arange(256, dtype=np.float32)


def functions_called(work: Callable[[], object], transport: Any = None) -> list[str]:
    """Return the package's functions that work calls, in order; not the transport's, nor the emulator's."""
    frames: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(PACKAGE) and not file.startswith(EMULATOR)
        if event == "call" and is_ours and frame not in frames:  # a generator that goes on is not called again
            frames.append(frame)

    def send_unseen(*message: Any) -> Any:
        sys.setprofile(None)
        answer = type(transport).send(transport, *message)
        sys.setprofile(note)
        return answer

    if transport is not None:
        transport.send = send_unseen
    gc.disable()  # finalizers of what earlier tests have left are none of the call's functions
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}" for frame in frames]


def test_a_warm_call_is_short() -> None:
    def call(client: ShmClient) -> None:
        np.testing.assert_array_equal(client.infer("m", {"IN0": LONG})["OUT0"], 2 * LONG)

    with FakeServer(config("m")) as server, client_of(server) as client:
        for _ in range(3):
            call(client)
        inputs = {"IN0": LONG}
        found = functions_called(lambda: client.infer("m", inputs), client._driver.transport)
    print(f"{len(found)} functions:", *found, sep="\n  ")
    assert len(found) <= MOST


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


@pytest.mark.parametrize("x", [SMALL, LARGE])
@pytest.mark.parametrize("kind", ["call", "sent again", "stream"])
def test_large_inputs_are_copied_in_another_thread(threads: list[bool], x: np.ndarray[Any, Any], kind: str) -> None:
    def frames(order: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield {"OUT0": np.ones(1, np.float32)}

    def refuse_the_first(order: Order) -> None:
        if kind == "sent again" and len(lone.orders) == 1:
            raise InferenceError(refusal(SlotInUseError("the slot is in use")), "StatusCode.CANCELLED")

    async def work() -> None:
        async with async_client_of(lone) as client:
            if kind == "stream":
                async for result in client.stream("m", {"IN0": x}):
                    result.release()
            else:
                (await client.infer("m", {"IN0": x})).release()

    described = config("m", model_transaction_policy={"decoupled": kind == "stream"})
    with FakeServer(described, compute=frames if kind == "stream" else doubled) as lone:
        lone.before = refuse_the_first
        asyncio.run(work())
    assert threads == [x is SMALL] * (2 if kind == "sent again" else 1)


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


def test_a_server_says_whether_it_is_live_and_ready_and_unloads_models(server: FakeServer, call: Call) -> None:
    for question in ("live", "ready"):
        assert call(f"is_server_{question}") is True
        setattr(server, f"is_{question}", False)
        assert call(f"is_server_{question}") is False
    call("unload_model", "m")
    call("unload_model", "m", unload_dependents=True)
    assert server.unloads == [("m", False), ("m", True)]


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
)
def test_a_dead_model_is_not_ready(server: FakeServer, call: Call, said: str, status: str, is_ready: bool) -> None:
    def refuse(_: Order) -> None:
        raise InferenceError(said, status)

    def say_nothing(_: Order) -> None:
        raise DeadlineExceededError("no answer", "StatusCode.DEADLINE_EXCEEDED")

    server.before = refuse
    assert call("is_model_ready", "m") is is_ready
    server.before = say_nothing
    with pytest.raises(DeadlineExceededError):
        call("is_model_ready", "m")
    server.configs["m"]["parameters"] = {}  # it has no session, and so gets no request
    assert call("is_model_ready", "m") is True


def test_streams_ask_decoupled(server: FakeServer, call: Call, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Order) -> Iterator[Any]:
        raise InferenceError("Stub process 'd_0_0' is not healthy.", "StatusCode.INTERNAL")

    server.configs["d"] = config("d", model_transaction_policy={"decoupled": True})
    monkeypatch.setattr(server, "stream", die)
    assert call("is_model_ready", "d") is (protocol == "http")


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


def test_clients_offer_the_same_and_refuse_a_time_that_is_none(call: Call) -> None:
    def offered(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert offered(ShmClient) == offered(AsyncShmClient)
    for wrong in (0, -1, "3"):
        with pytest.raises(TimeoutValueError, match="wait_ready_s is"):
            call("is_server_ready", wait_ready_s=wrong)


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
def test_clients_wait(server: FakeServer, call: Call, monkeypatch: pytest.MonkeyPatch, ups: int, readies: int) -> None:
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
