"""Streams, batches and coroutines that end before their time, or are not what they should be; probes among them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, ModelError
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.model.modes import batch, completion, stream
from shm_backend_utils.protocol.spans import Ring
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit import emulated
from tests.unit.emulated import answers_to, message_of
from tests.unit.modes.doubling import MakeClient, Open, X
from tests.unit.sessions import tensor
from tests.unit.table_client import Client
from tests.unit.test_probe import never, probe_of, report_in

SLOTS = 4


def streaming(open_session: Open) -> ShmSession:
    return open_session(model_transaction_policy={"decoupled": True})


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
    streaming(open_session).serve_streams([request], frames(5, sent))
    assert sent == [0]
    assert [None if each is None else each.error() for each in answers_to(request).sent] == [None, None]
    assert client.is_over()


def test_a_client_is_asked_now_and_then(open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(stream, "_LOOK_AT_CLIENT_S", 5)
    sent: list[int] = []
    asked: list[int] = []

    def is_cancelled(request: InferenceRequest) -> bool:
        asked.append(len(sent))
        return False

    request = client.request({"X": X}, {"Y": 16})
    monkeypatch.setattr(InferenceRequest, "is_cancelled", is_cancelled)
    streaming(open_session).serve_streams([request], frames(20, sent))
    assert asked == [5, 10, 15, 20]


def test_the_generator_is_closed_first(open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LOOK_AT_CLIENT_S", 0)
    request = client.request({"X": X}, {"Y": 16})
    answers_to(request).is_given_up = True
    found: list[Any] = []

    def answer(call: StreamCall) -> Iterator[None]:
        try:
            yield
        finally:
            found.append((call.input("X").numpy().tolist(), len(answers_to(request).sent)))

    streaming(open_session).serve_streams([request], answer)
    assert found == [(X.tolist(), 1)]
    assert len(answers_to(request).sent) == 2


def test_a_stream_whose_client_is_gone_ends(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, make_client: MakeClient
) -> None:
    monkeypatch.setattr(stream, "_LOOK_AT_CLIENT_S", 0)
    client = make_client()
    request, sent = client.request({"X": X}, {"Y": 16}), []  # type: ignore[var-annotated]

    def answer(call: StreamCall) -> Iterator[None]:
        for _ in frames(5, sent)(call):
            yield
            client.region.segment.unlink()

    streaming(open_session).serve_streams([request], answer)
    assert sent == [0, 1]


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


def test_a_stream_that_is_over_sends_nothing(open_session: Open, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16})
    with streaming(open_session).stream(request) as call:
        call.put("Y", X)
        call.send()
    with pytest.raises(ClosedError, match="this call"):
        call.send()
    assert len(answers_to(request).sent) == 2


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 4), (1, 4), (3, 2), (4, 1)])
def test_a_ring_of_slots_that_are_no_others_fails(open_session: Open, client: Client, first: int, count: int) -> None:
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(first, count, 64))
    streaming(open_session).serve_streams([request], frames(1, []))
    (response,) = answers_to(request).sent
    assert response is not None
    assert message_of(response).startswith("shm:table: frame_slot: found slots")
    assert client.is_free()


def test_an_output_put_to_a_batch_needs_its_rows(open_session: Open, client: Client) -> None:
    inputs = [tensor("X", dims=[-1]), tensor("SHM", "UINT8")]
    session = open_session(inputs, [tensor("Y", dims=[-1])], max_batch_size=8)
    x = np.ones((2, 4), np.float32)
    carried = {"SHM": np.empty((2, 0), np.uint8)}

    def infer(rows: BatchCall) -> None:
        for wrong in (np.ones((3, 4), "f4"), np.ones((5, 4), "f4"), np.float32(1)):
            with pytest.raises(ModelError, match="but the batch has 4 rows"):
                rows.put("Y", wrong)
        rows.put("Y", rows.input("X").numpy() * 2)

    requests = [client.request({"X": x}, {"Y": 32}, slot, delivered=carried) for slot in range(2)]
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


def test_rows_that_touch_in_two_mappings_are_not_one_view() -> None:
    whole = np.zeros(64, np.uint8)
    first, second = HostMemory(whole[:32]), HostMemory(whole[32:])
    assert not batch._follow_one_another([(first, 16, 16), (second, 0, 16)])
    assert batch._follow_one_another([(first, 0, 16), (first, 16, 16)])
    assert not batch._follow_one_another([(first, 0, 16), (first, 17, 15)])
    assert not batch._follow_one_another([(first, 16, 16), (first, 0, 16)])


class GoneStream:
    """As a StreamCall, whose client is gone."""

    def __enter__(self) -> GoneStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self) -> None:
        raise OSError("the client is gone")


def test_a_generator_that_fails_in_its_end_keeps_nothing() -> None:
    """Nothing of the stream waits for the collector."""
    watched: list[weakref.ref[GoneStream]] = []

    def answer(_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise KeyError("of the model's own end")

    def serve() -> None:
        gone: Any = GoneStream()
        watched.append(weakref.ref(gone))
        with pytest.raises(KeyError, match="of the model's own end"):
            stream.run_stream(gone, answer)

    gc.disable()
    try:
        serve()
        assert watched[0]() is None
    finally:
        gc.enable()


@pytest.fixture
def clients(make_client: MakeClient) -> list[Client]:
    return [make_client() for _ in range(4)]


@pytest.fixture
def session(open_session: Open) -> ShmSession:
    inputs = [tensor("X", dims=[-1]), tensor("SHM", "UINT8")]
    return open_session(inputs, [tensor("Y", dims=[-1])], parameters={"SHM_PATHS": "direct"}, max_batch_size=8)


def probe(client: Client) -> Any:
    return emulated.delivered(client.begin(probe_of(client)), (), {"SHM": np.empty((1, 0), np.uint8)})


def mixed(clients: list[Client]) -> list[Any]:
    """Return a request, a probe, a request, a probe."""
    carried = {"SHM": np.empty((1, 0), np.uint8)}
    return [
        probe(client)
        if number % 2
        else client.request({"X": np.full((1, 3), number, np.float32)}, {"Y": 12}, delivered=carried)
        for number, client in enumerate(clients)
    ]


def check(clients: list[Client], responses: list[Any]) -> None:
    for number, (client, response) in enumerate(zip(clients, responses, strict=True)):
        assert client.is_over()
        if number % 2:
            assert emulated.message_of(response).startswith("shm:probed: ")
            assert report_in(client)["digest"]
        else:
            np.testing.assert_array_equal(client.output("Y"), np.full((1, 3), number + 1))


def plus_one(call: Any) -> None:
    call.put("Y", call.input("X").numpy() + 1)


def test_in_a_batch(session: ShmSession, clients: list[Client]) -> None:
    check(clients, session.serve_batch(mixed(clients), plus_one))


def test_one_after_the_other(session: ShmSession, clients: list[Client]) -> None:
    check(clients, session.serve(mixed(clients), plus_one))


def test_side_by_side(session: ShmSession, clients: list[Client]) -> None:
    async def infer(call: Any) -> None:
        await asyncio.sleep(0)
        plus_one(call)

    check(clients, asyncio.run(session.serve_async(mixed(clients), infer)))


def test_the_same_one_twice_in_a_batch(session: ShmSession, clients: list[Client]) -> None:
    request = probe(clients[0])
    first, second = (emulated.message_of(each) for each in session.serve_batch([request, request], never))
    assert first.startswith("shm:probed: ")
    assert second.startswith("shm:replayed: ")


def test_a_stream_has_one_answer(open_session: Open, clients: list[Client]) -> None:
    session = open_session(parameters={"SHM_PATHS": "direct"}, model_transaction_policy={"decoupled": True})
    requests = [emulated.delivered(client.begin(probe_of(client))) for client in clients]
    session.serve_streams(requests, never)
    for client, request in zip(clients, requests, strict=True):
        assert client.is_over()
        (answer,) = emulated.answers_to(request).sent
        assert emulated.answers_to(request).is_over
        assert emulated.message_of(answer).startswith("shm:probed: ")
