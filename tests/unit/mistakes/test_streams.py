"""Streams whose frames are all held, and frames where there is no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CallerError, DeadlineExceededError, InferenceError, ShmClient
from shm_backend_utils.client.errors import deadline_exceeded
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

X = np.ones(3, np.float32)
HELD = (
    "[StatusCode.DEADLINE_EXCEEDED] model 'stream' has no place for its next response: this client holds as many "
    "results of the stream as there are frames. Release them (leave their with blocks), keep copies (result.copy()), "
    "or ask for more frames"
)


def ten(_: Order, inputs: Arrays) -> Any:
    return ({"OUT0": inputs["IN0"] * factor} for factor in range(10))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    streams = config("stream", model_transaction_policy={"decoupled": True})
    with FakeServer(streams, config("m"), compute=ten) as server:
        server.frame_limit_s = 0.02
        yield server


def ask(client: ShmClient, **named: Any) -> Iterator[Any]:
    return client.stream("stream", {"IN0": X}, outputs={"OUT0": X.nbytes}, **named)


@pytest.mark.parametrize(("named", "count"), [({}, 8), ({"frames": 1}, 1), ({"frames": np.int64(3)}, 3)])
@pytest.mark.parametrize("what", ["results", "arrays"])
def test_who_holds_every_frame_is_told(server: FakeServer, named: dict[str, Any], count: int, what: str) -> None:
    kept: list[Any] = []
    with client_of(server) as client:
        with pytest.raises(DeadlineExceededError) as error:
            kept.extend(result if what == "results" else result["OUT0"] for result in ask(client, **named))
        assert str(error.value) == HELD
        assert len(kept) == count


def test_so_is_a_task(server: FakeServer) -> None:
    async def keep() -> list[Any]:
        async with async_client_of(server) as client:
            answers = client.stream("stream", {"IN0": X}, outputs={"OUT0": X.nbytes})
            return [result async for result in answers]

    with pytest.raises(DeadlineExceededError) as error:
        asyncio.run(keep())
    assert str(error.value) == HELD


def test_who_holds_fewer_is_told_that_the_server_does_not_answer(server: FakeServer) -> None:
    def three_and_no_more(_: Order, inputs: Arrays) -> Iterator[Arrays]:
        yield from [{"OUT0": inputs["IN0"]}] * 3
        raise deadline_exceeded()

    server.compute = three_and_no_more
    kept: list[Any] = []
    with client_of(server) as client:
        with pytest.raises(DeadlineExceededError, match="the server did not answer before the deadline"):
            kept.extend(ask(client))
        assert len(kept) == 3


def test_frames_of_a_model_that_is_not_decoupled(server: FakeServer) -> None:
    with client_of(server) as client, pytest.raises(CallerError) as error:
        list(client.stream("m", {"IN0": X}, frames=8))
    assert str(error.value) == (
        "frames is 8, but model 'm' is not decoupled: its stream has one response; leave frames out, or use infer()"
    )


@pytest.mark.parametrize("frames", [0, 65, 2.5, "4"])
def test_frames_that_are_no_number_of_them(server: FakeServer, frames: Any) -> None:
    with client_of(server) as client, pytest.raises(CallerError) as error:
        list(ask(client, frames=frames))
    assert str(error.value) == f"frames is {frames!r}; expected a whole number, 1 to 64"


@pytest.mark.parametrize(("protocol", "status"), [("grpc", "StatusCode.UNIMPLEMENTED"), ("http", "501")])
def test_a_decoupled_model_is_not_asked_for_one_answer(protocol: Any, status: str) -> None:
    def refuse(_: Order) -> None:
        raise InferenceError("ModelInfer RPC doesn't support models with decoupled transaction policy", status)

    decoupled = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(decoupled, config("single")) as server, client_of(server, protocol) as client:
        server.before = refuse
        x = np.zeros(3, np.float32)
        with pytest.raises(InferenceError, match=r"model 'm' is decoupled, .*: ask for them by stream\(\), over gRPC"):
            client.infer("m", {"IN0": x})
        with client.prepare("m", {"IN0": ((3,), np.float32)}) as call:
            with pytest.raises(InferenceError, match=r"ask for them by stream\(\)") as error:
                call.infer()
            assert error.value.status() == status
        with pytest.raises(InferenceError, match="^((?!by stream).)*$"):
            client.infer("single", {"IN0": x})
