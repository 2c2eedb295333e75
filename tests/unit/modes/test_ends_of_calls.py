"""Streams, batches and coroutines that end before their time, or are not what they should be; probes among them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.model.modes import completion, stream
from tests.unit.emulated import answers_to, delivered, message_of
from tests.unit.modes.conftest import MakeClient, Open, X, batched, carrier_of, streaming
from tests.unit.table_client import Client
from tests.unit.test_probe import probe_of, report_in

SLOTS = 4


def frames(count: int, sent: list[int]) -> Any:
    def answer(call: StreamCall) -> Iterator[None]:
        for number in range(count):
            call.put("Y", X + number)
            sent.append(number)
            yield

    return answer


def test_a_cancelled_stream_ends_quietly(open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LOOK_AT_CLIENT_S", 0)
    request, sent = client.request({"X": X}, {"Y": 16}), []  # type: ignore[var-annotated]
    answers_to(request).is_given_up = True
    found: list[Any] = []

    def answer(call: StreamCall) -> Iterator[None]:
        try:
            yield from frames(5, sent)(call)
        finally:
            found.append((call.input("X").numpy().tolist(), len(answers_to(request).sent)))

    streaming(open_session).serve_streams([request], answer)
    assert sent == [0]
    assert found == [(X.tolist(), 1)]
    assert [None if each is None else each.error() for each in answers_to(request).sent] == [None, None]
    assert client.is_over()


def test_a_stream_that_is_left_while_forward_async_runs_fails(open_session: Open, client: Client) -> None:
    request, given_up = client.request({"X": X}, {"Y": 16}), []
    under_way: Any = SimpleNamespace(give_up=lambda: given_up.append(True))
    call = streaming(open_session).stream(request)
    with pytest.raises(ModelError, match="calls of other models were under way"), call:
        call._pending = {1: under_way}.values()  # type: ignore[assignment]
    (response,) = answers_to(request).sent
    assert "of other models" in message_of(response)
    assert given_up == [True]
    assert client.is_free()
    assert client.region.record(0).completed == 0


def test_an_output_put_to_a_batch_needs_its_rows(open_session: Open, client: Client) -> None:
    session, x = batched(open_session), np.ones((2, 4), np.float32)

    def infer(rows: BatchCall) -> None:
        for wrong in (np.ones((3, 4), "f4"), np.ones((5, 4), "f4"), np.float32(1)):
            with pytest.raises(ModelError, match="but the batch has 4 rows"):
                rows.put("Y", wrong)
        rows.put("Y", rows.input("X").numpy() * 2)

    requests = [client.request({"X": x}, {"Y": 32}, slot, delivered=carrier_of(2)) for slot in range(2)]
    responses = session.serve_batch(requests, infer)
    assert [response.error() for response in responses] == [None, None]
    assert client.output("Y", 1).tolist() == (x * 2).tolist()


def test_a_coroutine_that_is_closed_gives_the_slot_back(open_session: Open, client: Client) -> None:
    call = open_session().open(client.request({"X": X}, {"Y": 16}))

    async def infer(call: Call) -> None:
        await asyncio.Event().wait()

    serving = completion.serve_one(call, infer, lambda call, error: call.fail(error))

    async def begin() -> None:
        task: Any = serving.send(None)
        assert task is not None

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    serving.close()
    loop.close()
    assert "GeneratorExit" in message_of(call.response)
    assert client.is_over()


def test_what_a_function_returns_is_not_kept(open_session: Open, client: Client) -> None:
    returned: list[weakref.ref[Any]] = []

    def infer(call: Call) -> Any:
        assert not any(each() is not None for each in returned)
        y = call.output("Y", X.shape, X.dtype).numpy()
        y[:] = X
        returned.append(weakref.ref(y))
        return y

    requests = [client.request({"X": X}, {"Y": 16}, slot=slot) for slot in range(3)]
    assert [each.error() for each in open_session().serve(requests, infer)] == [None] * 3


def plus_one(call: Any) -> None:
    call.put("Y", call.input("X").numpy() + 1)


async def plus_one_later(call: Any) -> None:
    await asyncio.sleep(0)
    plus_one(call)


def one_frame(call: Any) -> Iterator[None]:
    plus_one(call)
    yield


def streamed(session: ShmSession, requests: list[Any]) -> list[Any]:
    session.serve_streams(requests, one_frame)
    return [answers_to(request).sent[-1] for request in requests]


WAYS: dict[str, Callable[[ShmSession, list[Any]], list[Any]]] = {
    "in a batch": lambda session, requests: session.serve_batch(requests, plus_one),
    "one after the other": lambda session, requests: session.serve(requests, plus_one),
    "side by side": lambda session, requests: asyncio.run(session.serve_async(requests, plus_one_later)),
    "in streams": streamed,
}


@pytest.mark.parametrize("way", WAYS)
def test_probes_among_requests(open_session: Open, make_client: MakeClient, way: str) -> None:
    policy = {"model_transaction_policy": {"decoupled": True}} if way == "in streams" else {}
    session = batched(open_session, parameters={"SHM_PATHS": "direct"}, **policy)
    probing, asking = make_client(), make_client()
    x = np.full((1, 3), 7, np.float32)
    requests = [
        asking.request({"X": x}, {"Y": 12}, delivered=carrier_of(1)),
        delivered(probing.begin(probe_of(probing)), (), carrier_of(1)),
    ]
    _, probed = WAYS[way](session, requests)
    assert message_of(probed).startswith("shm:probed: ")
    assert report_in(probing)["digest"]
    assert asking.is_over()
    assert probing.is_over()
    assert len(answers_to(requests[1]).sent) == (way == "in streams")
    if way != "in streams":  # where there is no ring
        np.testing.assert_array_equal(asking.output("Y"), x + 1)
