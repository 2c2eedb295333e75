"""What a call sends is what its arguments say at that moment, also where a thread copies it for the event loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.errors import SlotInUseError, refusal
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from tests.unit.fake_server import Arrays, FakeServer, Order, config, doubled
from tests.unit.fake_wires import async_client_of, client_of

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("batches", max_batch_size=8)) as server:
        yield server


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
    parameters.clear()
    client.infer("m", {"IN0": X}, parameters=parameters, path=path)
    assert users(server.orders[-1]) == []
    if path == "direct":
        named = [(order.parameters[SLOT_PARAMETER], order.parameters[GENERATION_PARAMETER]) for order in server.orders]
        assert len(set(named)) == len(named), "every request has a generation of its own"


def test_options_of_one_call_are_not_the_next_ones(client: ShmClient, server: FakeServer) -> None:
    client.infer("m", {"IN0": X}, parameters={"a": 1}, queue_timeout_us=1000, headers={"token": "x"}, outputs=["OUT0"])
    assert {name: value for name, _, value in users(server.orders[-1])} == {"a": 1, "timeout": 1000}
    client.infer("m", {"IN0": X})
    assert users(server.orders[-1]) == []
    assert "token" not in {name.lower() for name in server.orders[-1].headers}
    assert server.orders[-1].outputs is None


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
MOST = 25
LONG = np.arange(256, dtype=np.float32)


def functions_called(work: Callable[[], object], transport: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the package's functions that work calls, in order; not the transport's, which is a fake.

    A generator that goes on is not called again.
    """
    frames: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame not in frames:
            frames.append(frame)

    send = transport.send

    def send_unseen(message: Any, timeout_s: float) -> Any:
        sys.setprofile(None)
        answer = send(message, timeout_s)
        sys.setprofile(note)
        return answer

    with patch.context() as patched:
        patched.setattr(transport, "send", send_unseen)
        gc.disable()  # finalizers of what earlier tests have left are none of the call's functions
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            gc.enable()
    return [f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}" for frame in frames]


def test_a_warm_call_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(client: ShmClient) -> None:
        np.testing.assert_array_equal(client.infer("m", {"IN0": LONG})["OUT0"], 2 * LONG)

    with FakeServer(config("m")) as server, client_of(server) as client:
        for _ in range(3):
            call(client)
        inputs = {"IN0": LONG}
        found = functions_called(lambda: client.infer("m", inputs), client._driver.transport, monkeypatch)
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


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
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
