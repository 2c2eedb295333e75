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
from shm_backend_utils.protocol.spans import Ring
from tests.unit import emulated
from tests.unit.emulated import answers_to, message_of
from tests.unit.modes.doubling import MakeClient, Open, X, batched, carrier_of, streaming
from tests.unit.table_client import Client
from tests.unit.test_probe import never, probe_of, report_in

SLOTS = 4


def frames(count: int, sent: list[int]) -> Any:
    def answer(call: StreamCall) -> Iterator[None]:
        for number in range(count):
            call.put("Y", X + number)
            sent.append(number)
            yield

    return answer


def test_a_cancelled_stream_ends_quietly_and_its_generator_is_closed_first(
    open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert response is not None
    assert "of other models" in message_of(response)
    assert given_up == [True]
    assert client.is_free()
    assert client.region.record(0).completed == 0


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 4), (1, 4), (3, 2), (4, 1)])
def test_a_ring_of_slots_that_are_no_others_fails(open_session: Open, client: Client, first: int, count: int) -> None:
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(first, count, 64))
    streaming(open_session).serve_streams([request], frames(1, []))
    (response,) = answers_to(request).sent
    assert response is not None
    assert message_of(response).startswith("shm:table: frame_slot: found slots")
    assert client.is_free()


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


@pytest.fixture
def clients(make_client: MakeClient) -> list[Client]:
    return [make_client() for _ in range(4)]


@pytest.fixture
def session(open_session: Open) -> ShmSession:
    return batched(open_session, parameters={"SHM_PATHS": "direct"})


def probe(client: Client) -> Any:
    return emulated.delivered(client.begin(probe_of(client)), (), carrier_of(1))


def mixed(clients: list[Client]) -> list[Any]:
    return [
        probe(client)
        if number % 2
        else client.request({"X": np.full((1, 3), number, np.float32)}, {"Y": 12}, delivered=carrier_of(1))
        for number, client in enumerate(clients)
    ]


def plus_one(call: Any) -> None:
    call.put("Y", call.input("X").numpy() + 1)


async def plus_one_later(call: Any) -> None:
    await asyncio.sleep(0)
    plus_one(call)


WAYS: dict[str, Callable[[ShmSession, list[Any]], list[Any]]] = {
    "in a batch": lambda session, requests: session.serve_batch(requests, plus_one),
    "one after the other": lambda session, requests: session.serve(requests, plus_one),
    "side by side": lambda session, requests: asyncio.run(session.serve_async(requests, plus_one_later)),
}


@pytest.mark.parametrize("serve", WAYS.values(), ids=WAYS)
def test_probes_among_requests(
    session: ShmSession, clients: list[Client], serve: Callable[[ShmSession, list[Any]], list[Any]]
) -> None:
    for number, (client, response) in enumerate(zip(clients, serve(session, mixed(clients)), strict=True)):
        assert client.is_over()
        if number % 2:
            assert message_of(response).startswith("shm:probed: ")
            assert report_in(client)["digest"]
        else:
            np.testing.assert_array_equal(client.output("Y"), np.full((1, 3), number + 1))


def test_a_stream_has_one_answer(open_session: Open, clients: list[Client]) -> None:
    session = streaming(open_session, parameters={"SHM_PATHS": "direct"})
    requests = [emulated.delivered(client.begin(probe_of(client))) for client in clients]
    session.serve_streams(requests, never)
    for client, request in zip(clients, requests, strict=True):
        assert client.is_over()
        (answer,) = emulated.answers_to(request).sent
        assert emulated.answers_to(request).is_over
        assert emulated.message_of(answer).startswith("shm:probed: ")
