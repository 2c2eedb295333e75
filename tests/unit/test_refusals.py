"""Errors on their way: the word of a refusal, others' errors told as this library's, and those that cannot be told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import errors
from shm_backend_utils.errors import ModelError, PeerError, StaleRequestError, TableError, code_in, refusal, translate
from tests.unit.emulated import answers_to, emulated_server, error_code, log_lines, message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


def test_a_refusal_begins_with_its_code_and_the_first_of_several_is_read_back() -> None:
    assert refusal(TableError("length", "7", "32 to 2048")) == "shm:table: length: found 7, expected 32 to 2048"
    for name in errors.__all__:
        kind = getattr(errors, name)
        error = kind.__new__(kind)
        error.args = ("some words: and more",)
        assert refusal(error) == f"{kind.code}: some words: and more"
        assert code_in(refusal(error)) == kind.code
    inner = refusal(StaleRequestError("given up"))
    assert code_in(refusal(ModelError(f"another model failed: {inner}"))) == "shm:model"

    class Quiet(PeerError):
        pass

    assert refusal(Quiet("x")) == "shm:peer: x", "it has its parent's code"


FRONTS = ["", "in ensemble 'two_steps', ", "[request id: 77] ", "[StatusCode.CANCELLED] ", "[400] in ensemble 'a b', "]
OTHERS = [
    *("", "shm:", "shm:stale", "shm:stale:", "SHM:STALE: ", "shm:Stale: no code of ours", " shm:stale: "),
    *("RuntimeError: shm:stale: what model.py has read elsewhere", "the model says shm:stale: ", "\nshm:stale: "),
    "in ensemble 'x',shm:stale: ",
]


def test_what_triton_puts_in_front_is_passed_over_and_other_text_has_no_code() -> None:
    assert {code_in(front + refusal(StaleRequestError("given up"))) for front in FRONTS} == {"shm:stale"}
    assert [text for text in OTHERS if code_in(text)] == []


class OthersError(Exception):
    pass


class OwnError(Exception):
    pass


def own(error: OthersError) -> OwnError:
    return OwnError(f"it is {error}")


def raise_others(text: str) -> None:
    raise OthersError(text)


class Memory:
    pass


def test_what_means_nothing_else_is_raised_itself_and_errors_of_other_kinds_are_left_alone() -> None:
    error = OthersError("x")
    with pytest.raises(OthersError) as caught, translate(OthersError, lambda _: None):
        raise error
    assert caught.value is error
    with pytest.raises(KeyError), translate((OthersError, OSError), lambda error: OwnError(str(error))):
        raise KeyError("x")


def test_an_error_of_a_block_and_of_a_function_is_told_each_time() -> None:
    with translate(OthersError, own):
        pass
    told = translate(OthersError, own)(raise_others)
    for text in ("early", "late"):
        with pytest.raises(OwnError, match=f"it is {text}"):
            told(text)
    with pytest.raises(OwnError, match="it is late") as caught, translate(OthersError, own):
        raise_others("late")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert isinstance(caught.value.__context__, OthersError)


def test_what_the_frames_had_in_hand_goes_with_the_error() -> None:
    gone: list[weakref.ref[Memory]] = []

    def map_it() -> None:
        memory = Memory()
        gone.append(weakref.ref(memory))
        with translate(OthersError, own):
            raise_others("refused")

    def serve() -> str:
        memory = Memory()
        gone.append(weakref.ref(memory))
        try:
            map_it()
        except OwnError as error:
            return str(error)
        return ""

    gc.disable()
    try:
        assert serve() == "it is refused"
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


X = np.arange(4, dtype=np.float32)


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has none")


class WithoutArgumentsError(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise SystemExit


ERRORS: dict[str, Callable[[], Exception]] = {
    "of this package": lambda: ModelError("model.py has caused a ModelError"),
    "no text": WithoutTextError,
    "no arguments": WithoutArgumentsError,
    "text without UTF-8": lambda: ValueError("\udc80"),
}


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Client())) for _ in range(2)]


def failing_first(error: Callable[[], Exception]) -> Callable[[Any], None]:
    def infer(call: Any) -> None:
        if call.parameters["fails"]:
            raise error()
        call.put("Y", call.input("X"))

    return infer


def check(responses: list[Any], clients: list[Client], error: type[Exception]) -> None:
    assert error.__name__ in message_of(responses[0])
    assert (error_code(responses[0]), responses[1].error()) == ("INTERNAL", None)
    assert [client.is_over() for client in clients] == [True, True]
    np.testing.assert_array_equal(clients[1].output("Y"), X)


@pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_model_py_is_the_requests_own_and_is_logged_with_its_lines(
    monkeypatch: pytest.MonkeyPatch, clients: list[Client], error: Callable[[], Exception], is_async: bool
) -> None:
    infer = failing_first(error)

    def refuse(level: str, message: str) -> None:
        raise TypeError("incompatible function arguments")

    async def infer_async(call: Any) -> None:
        infer(call)

    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        requests = [client.request({"X": X}, {"Y": 16}, fails=not n) for n, client in enumerate(clients)]
        if is_async:
            check(asyncio.run(session.serve_async(requests, infer_async)), clients, type(error()))
        else:
            check(session.serve(requests, infer), clients, type(error()))
        (line,) = log_lines()
        assert "Traceback" in line
        monkeypatch.setattr(emulated_server(), "log", refuse)  # which does not matter
        requests = [client.request({"X": X}, {"Y": 16}, fails=not n) for n, client in enumerate(clients)]
        check(session.serve(requests, infer), clients, type(error()))


@pytest.mark.parametrize("count", [1, 2])
def test_a_closed_session_ends_every_stream(monkeypatch: pytest.MonkeyPatch, clients: list[Client], count: int) -> None:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy={"decoupled": True}) as session:
        session.close()
        requests = [client.request({"X": X}, {"Y": 16}) for client in clients[:count]]
        session.serve_streams(requests, lambda call: None)
        assert [answers_to(request).is_over for request in requests] == [True] * count
        assert all("shm:closed" in message_of(answers_to(request).sent[0]) for request in requests)
