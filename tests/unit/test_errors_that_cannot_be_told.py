"""A request fails alone, and gives its slot back, whatever becomes of the words about it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.emulated import answers_to, emulated_server, log_lines, message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has none")


class WithoutArgumentsError(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise SystemExit


ERRORS: dict[str, Callable[[], Exception]] = {
    "no text": WithoutTextError,
    "no arguments": WithoutArgumentsError,
    "text without UTF-8": lambda: ValueError("\udc80"),
}


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Client())) for _ in range(2)]


def check(responses: list[Any], clients: list[Client], error: type[Exception]) -> None:
    assert error.__name__ in message_of(responses[0])
    assert responses[1].error() is None
    assert [client.is_over() for client in clients] == [True, True]
    np.testing.assert_array_equal(clients[1].output("Y"), X)


@pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_without_words_is_the_requests_own(
    monkeypatch: pytest.MonkeyPatch, clients: list[Client], error: Callable[[], Exception], is_async: bool
) -> None:
    def infer(call: Any) -> None:
        if call.parameters.get("fails"):
            raise error()
        call.put("Y", call.input("X"))

    async def infer_async(call: Any) -> None:
        infer(call)

    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        requests = [client.request({"X": X}, {"Y": 16}, fails=not n) for n, client in enumerate(clients)]
        if is_async:
            check(asyncio.run(session.serve_async(requests, infer_async)), clients, type(error()))
        else:
            check(session.serve(requests, infer), clients, type(error()))
        assert len(log_lines()) == 1


def test_a_log_that_takes_nothing_does_not_matter(monkeypatch: pytest.MonkeyPatch, clients: list[Client]) -> None:
    def refuse(level: str, message: str) -> None:
        raise TypeError("incompatible function arguments")

    def infer(call: Any) -> None:
        if call.parameters.get("fails"):
            raise ValueError("wrong")
        call.put("Y", call.input("X"))

    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        monkeypatch.setattr(emulated_server(), "log", refuse)
        requests = [client.request({"X": X}, {"Y": 16}, fails=not n) for n, client in enumerate(clients)]
        check(session.serve(requests, infer), clients, ValueError)


def test_a_batch_and_a_stream_end_by_an_error_without_words(
    monkeypatch: pytest.MonkeyPatch, clients: list[Client]
) -> None:
    def fail(call: Any) -> None:
        raise WithoutTextError

    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy={"decoupled": True}) as session:
        request = clients[0].request({"X": X}, {"Y": 16})
        session.serve_streams([request], fail)
        assert answers_to(request).is_over
        assert clients[0].is_over()
    carrier = tensor("SHM", "UINT8")
    with session_of(monkeypatch, [tensor("X"), carrier], [tensor("Y")], max_batch_size=4) as batches:
        answers = batches.serve_batch([rows_of(clients[1])], fail)
        assert "WithoutTextError" in message_of(answers[0])
        assert clients[1].is_over()


def rows_of(client: Client) -> Any:
    return client.request({"X": X.reshape(1, 4)}, {"Y": 16}, delivered={"SHM": np.empty((1, 0), np.uint8)})


@pytest.mark.parametrize("count", [1, 2])
def test_a_closed_session_ends_every_stream(monkeypatch: pytest.MonkeyPatch, clients: list[Client], count: int) -> None:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy={"decoupled": True}) as session:
        session.close()
        requests = [client.request({"X": X}, {"Y": 16}) for client in clients[:count]]
        session.serve_streams(requests, lambda call: None)
        assert [answers_to(request).is_over for request in requests] == [True] * count
        assert all("shm:closed" in message_of(answers_to(request).sent[0]) for request in requests)
