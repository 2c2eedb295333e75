"""Answers that are not the model's, or not of the model that is known: no memory is used again, and calls heal."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ServerUnavailableError, ShmClient
from shm_backend_utils.client.errors import ConnectionLostError, translated
from shm_backend_utils.client.paths.exchange import is_answer
from shm_backend_utils.client.transports.http.codec import Answer
from shm_backend_utils.errors import PeerError
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)
LONG_S = 10.0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m", dims="6")) as server:
        yield server


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("body", [b"<html>Gateway Timeout</html>", b'{"message": "timeout"}', b""], ids=repr)
def test_a_gateways_answer_says_nothing_of_the_request(status: int, body: bytes) -> None:
    error = Answer(status, {}, body).error("http://localhost")
    assert isinstance(error, ConnectionLostError)
    assert not is_answer(error)


def test_what_triton_says_is_its_answer() -> None:
    for status in (400, 404, 500, 503):
        error = Answer(status, {}, b'{"error": "not ready"}').error("http://localhost")
        assert error is not None
        assert is_answer(error)
    refused = Answer(413, {}, b"too large").error("http://localhost")
    assert refused is not None
    assert is_answer(refused)


@pytest.mark.parametrize(
    "text", ["Received http2 header with status: 504", "upstream request timeout", "upstream connect error or reset"]
)
def test_a_proxys_answer_over_grpc_says_nothing_of_the_request(text: str) -> None:
    error = translated("StatusCode.UNAVAILABLE", text, "grpc://localhost")
    assert isinstance(error, ServerUnavailableError)
    assert is_answer(translated("StatusCode.UNAVAILABLE", "Request for unknown model: 'm' is not ready", "there"))


def test_memory_of_a_request_that_a_gateway_gave_up_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    with client_of(server, "http") as client:
        transport = client._driver.transport
        send = transport.send
        late: list[Any] = []

        def give_up(message: Any, timeout_s: float) -> Any:
            if not message.path.endswith("infer"):
                return send(message, timeout_s)
            late.append(message)
            error = Answer(504, {}, b"Gateway Timeout").error("http://localhost")
            assert error is not None
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(transport, "send", give_up)
            with pytest.raises(ConnectionLostError):
                client.infer("m", {"IN0": X}, path="triton-shm")
        result = client.infer("m", {"IN0": X}, path="triton-shm")["OUT0"]
        server.compute = lambda order, inputs: {"OUT0": inputs["IN0"] * 0 - 1}
        with contextlib.suppress(Exception):  # the memory is not registered any more
            send(late[0], LONG_S)
        np.testing.assert_array_equal(result, X * 2)


def outcomes(client: ShmClient, count: int = 2, **inputs: Any) -> list[str]:
    found = []
    for _ in range(count):
        try:
            found.append(client.infer("m", inputs).path)
        except PeerError as error:
            found.append(type(error).__name__)
    return found


def test_an_output_that_the_model_has_no_more_is_missed_once(server: FakeServer) -> None:
    server.configs["m"] = config("m", count=2)
    with client_of(server) as client:
        client.infer("m", {"IN0": X, "IN1": X})
        server.configs["m"] = {**config("m", count=2), "output": config("m")["output"]}
        server.compute = lambda order, inputs: {"OUT0": inputs["IN0"]}
        assert outcomes(client, IN0=X, IN1=X) == ["PeerError", "direct"]


def test_a_model_that_uses_no_slots_any_more_is_noticed_by_one_call(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    in_slot = FakeServer._in_slot

    def ignore(self: FakeServer, order: Order) -> Arrays:
        return {"OUT0": X} if not self.configs["m"]["parameters"] else in_slot(self, order)

    monkeypatch.setattr(FakeServer, "_in_slot", ignore)
    with client_of(server, inline_bytes=0) as client:
        client.infer("m", {"IN0": X})
        server.configs["m"] = config("m", dims="6", parameters={})
        assert outcomes(client, IN0=X) == ["PeerError", "triton-shm"]


def test_a_stream_may_end_in_the_garbage_collector_wherever_that_runs() -> None:
    def frames(order: Order, inputs: Arrays) -> Any:
        return ({"OUT0": inputs["IN0"]} for _ in range(5))

    class Collecting(Counter[str]):
        def __setitem__(self, key: str, value: int) -> None:
            gc.collect()
            super().__setitem__(key, value)

    decoupled = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(decoupled, compute=frames) as server, client_of(server) as client:
        stream = client.stream("m", {"IN0": X})
        next(iter(stream))
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        tally = client._core.tally  # type: ignore[union-attr]
        tally.paths = Collecting()
        counting = threading.Thread(target=tally.succeeded, args=("direct", 0), daemon=True)
        counting.start()
        counting.join(LONG_S)
        assert not counting.is_alive(), "the stream's end waits for a lock of its own thread"
        assert client.stats().failures == 1
