"""What a call sends is what its arguments say at that moment: nothing of an earlier one, nothing changed later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

X = np.arange(4, dtype=np.float32)


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("batches", max_batch_size=8)) as server:
        yield server


@pytest.fixture
def client(server: FakeServer, protocol: str) -> Iterator[ShmClient]:
    with client_of(server, protocol) as client:
        yield client


def users(order: Order) -> list[tuple[str, type, Any]]:
    """Return the user's own parameters as they came, with their types."""
    ours = (SLOT_PARAMETER, GENERATION_PARAMETER)
    return [(name, type(value), value) for name, value in order.parameters.items() if name not in ours]


def token(order: Order) -> str:
    found: str = {name.lower(): value for name, value in order.headers.items()}["token"]
    return found


@pytest.mark.parametrize("path", ["direct", "triton-shm", "inline"])
def test_parameters_that_change_in_place_between_two_calls_are_sent_as_they_are(
    client: ShmClient, server: FakeServer, path: Any
) -> None:
    parameters: dict[str, Any] = {"answer": 1}
    for value in (1, 1.0, True, "1", 2, 1):
        parameters["answer"] = value
        client.infer("m", {"IN0": X}, parameters=parameters, path=path)
        assert users(server.orders[-1]) == [("answer", type(value), value)]
    parameters.clear()
    client.infer("m", {"IN0": X}, parameters=parameters, path=path)
    assert users(server.orders[-1]) == []


def test_headers_that_change_in_place_between_two_calls_are_sent_as_they_are(
    client: ShmClient, server: FakeServer
) -> None:
    headers = {"token": "old"}
    for value in ("old", "new", "old"):
        headers["token"] = value
        client.infer("m", {"IN0": X}, headers=headers)
        assert token(server.orders[-1]) == value


def test_options_of_one_call_are_not_the_next_ones(client: ShmClient, server: FakeServer) -> None:
    client.infer(
        "m", {"IN0": X}, parameters={"a": 1}, priority=3, timeout=1000, headers={"token": "x"}, outputs=["OUT0"]
    )
    assert {name: value for name, _, value in users(server.orders[-1])} == {"a": 1, "priority": 3, "timeout": 1000}
    client.infer("m", {"IN0": X})
    assert users(server.orders[-1]) == []
    assert "token" not in {name.lower() for name in server.orders[-1].headers}
    assert server.orders[-1].outputs is None


def test_every_request_has_a_generation_of_its_own(client: ShmClient, server: FakeServer) -> None:
    for _ in range(5):
        client.infer("m", {"IN0": X})
    sent = [(order.parameters[SLOT_PARAMETER], order.parameters[GENERATION_PARAMETER]) for order in server.orders]
    assert len(set(sent)) == 5


def test_what_changes_after_submit_has_returned_is_not_sent(client: ShmClient, server: FakeServer) -> None:
    import threading

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


def test_an_array_that_changes_while_the_model_executes_is_not_what_it_executes_on(
    client: ShmClient, server: FakeServer
) -> None:
    array = X.copy()
    server.before = lambda _: array.fill(-1)
    np.testing.assert_array_equal(client.infer("m", {"IN0": array})["OUT0"], 2 * X)


def test_shapes_and_dtypes_that_look_alike_are_told_apart(client: ShmClient, server: FakeServer) -> None:
    server.configs["m"] = config("m", dims="-1,-1")
    for shape in ((2, 2), (1, 4), (4, 1), (0, 4), (2, 2)):
        given = np.zeros(shape, np.float32)
        assert client.infer("m", {"IN0": given})["OUT0"].shape == shape


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
