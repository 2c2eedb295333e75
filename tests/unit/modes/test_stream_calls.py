"""Responses one after another: in a ring, or through Triton; and calls of all modes that end before their time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, ModelError, RequestCancelledError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.model.modes import stream
from shm_backend_utils.model.session import serve_one
from shm_backend_utils.protocol.layout import SlotRecord
from shm_backend_utils.protocol.spans import MAX_FRAMES, OutputSpan, Ring, Table, frame_number
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import answers_to, delivered, message_of, outputs_of
from tests.unit.modes.conftest import MakeClient, Open, X, batched, carrier_of, streaming
from tests.unit.sessions import tensor
from tests.unit.table_client import Client
from tests.unit.test_probe import probe_of, report_in


def putting(count: int, pause_s: float = 0, value: Any = X) -> Callable[[StreamCall], Iterator[None]]:
    def answer(call: StreamCall) -> Iterator[None]:
        for _ in range(count):
            call.put("Y", value)
            yield
            time.sleep(pause_s)

    return answer


@pytest.fixture
def narrow(make_client: MakeClient) -> Client:
    return make_client(slots=2)


def narrow_request(narrow: Client) -> InferenceRequest:
    return narrow.request({"X": X}, {"Y": 16}, ring=Ring(1, 1, 1024))


def never_sends(call: StreamCall) -> Iterator[None]:
    call.put("Y", X)
    yield
    call.put("Y", X)


def yields_a_value(call: StreamCall) -> Iterator[Any]:
    yield X


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (never_sends, "model.py wrote Y and sent no response with it; yield, or call.send(), after the last output"),
        (yields_a_value, "model.py has yielded a value of type ndarray, which is not sent"),
    ],
)
def test_what_is_never_sent(open_session: Open, answer: Callable[[StreamCall], Iterator[Any]], message: str) -> None:
    request = delivered({}, ["Y"], {"X": X})
    streaming(open_session).serve_streams([request], answer)
    assert message in message_of(answers_to(request).sent[-1])


@pytest.mark.parametrize(("dtype", "value"), [("FP32", X.tolist()), ("STRING", [b"a", b"bc"])])
def test_without_a_ring_triton_answers(open_session: Open, client: Client, dtype: str, value: list[Any]) -> None:
    request = client.request({"X": X}, {"Y": 16})
    streaming(open_session, outputs=[tensor("Y", dtype)]).serve_streams([request], putting(2, value=value))
    assert [outputs_of(sent)["Y"].tolist() for sent in answers_to(request).sent[:-1]] == [value] * 2
    assert client.is_over()


def test_a_response_has_the_outputs_that_were_written_since_the_last_one(open_session: Open) -> None:
    request = delivered({}, ["Y", "Z"], {"X": X})

    def answer(call: StreamCall) -> Iterator[None]:
        for names in ("Y", "Z", "", "YZ"):
            for name in names:
                call.put(name, X)
            yield

    streaming(open_session, outputs=[tensor("Y"), tensor("Z")]).serve_streams([request], answer)
    assert [list(outputs_of(sent)) for sent in answers_to(request).sent if sent] == [["Y"], ["Z"], [], ["Y", "Z"]]


def test_a_client_that_releases_nothing_is_not_waited_for_for_ever(open_session: Open, narrow: Client) -> None:
    request = narrow_request(narrow)
    streaming(open_session, parameters={"SHM_STREAM_PATIENCE_S": "0.05"}).serve_streams([request], putting(1000))
    assert message_of(answers_to(request).sent[-1]).startswith("shm:stalled: ")
    assert narrow.is_over()


def test_a_client_that_has_given_its_stream_up_is_waited_for_no_longer(open_session: Open, narrow: Client) -> None:
    request = narrow_request(narrow)

    def answer(call: StreamCall) -> Iterator[None]:
        call.put("Y", X)
        yield
        narrow.region.record(0).generation += 1
        with pytest.raises(RequestCancelledError, match="the client does not want the rest of the stream"):
            call.put("Y", X)  # its only place was not released

    streaming(open_session, parameters={"SHM_STREAM_PATIENCE_S": "1"}).serve_streams([request], answer)
    assert answers_to(request).sent[1:] == [None]


@contextlib.contextmanager
def read_slowly(client: Client, pause_s: float) -> Iterator[None]:
    stop = threading.Event()

    def read() -> None:
        index = 0
        while not stop.is_set():
            if client.region.record(1).completed == frame_number(1, index):
                stop.wait(pause_s)
                client.region.record(1).generation = frame_number(1, index)
                index += 1
            stop.wait(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    yield
    stop.set()
    reader.join()


def test_a_client_that_always_reads_slowly_is_not_waited_for(open_session: Open, narrow: Client) -> None:
    request = narrow_request(narrow)
    patience = {"SHM_STREAM_PATIENCE_S": "10", "SHM_STREAM_TOTAL_PATIENCE_S": "0.3"}
    session = streaming(open_session, parameters=patience)
    with read_slowly(narrow, 0.05):
        begin = time.monotonic()
        session.serve_streams([request], putting(100))
        took_s = time.monotonic() - begin
    assert 0.3 <= took_s < 1.5
    said = message_of(answers_to(request).sent[-1])
    assert said.startswith("shm:stalled: the stream has waited for its client for 0.3 s altogether")
    assert len(answers_to(request).sent) > 3
    assert narrow.is_over()


def test_what_a_slow_model_takes_is_no_waiting_for_its_client(open_session: Open, narrow: Client) -> None:
    request = narrow_request(narrow)
    session = streaming(open_session, parameters={"SHM_STREAM_TOTAL_PATIENCE_S": "0.2"})
    with read_slowly(narrow, 0.03):
        session.serve_streams([request], putting(8, pause_s=0.06))
    assert answers_to(request).sent[-1] is None


def test_a_stream_that_was_not_entered_says_so(open_session: Open, client: Client) -> None:
    call = streaming(open_session).stream(client.request({"X": X}, {"Y": 16}))
    for use in (lambda: call.input("X"), lambda: call.put("Y", X), call.send, lambda: call.forward("other", {})):
        with pytest.raises(ModelError, match=r"has not begun; enter it first: with session.stream\(request\) as call"):
            use()
    with call:
        assert call.input("X").numpy().tolist() == X.tolist()
    for late in (lambda: call.input("X"), call.send):
        with pytest.raises(ClosedError, match="this call is closed"):
            late()
    plain = open_session().open(client.request({"X": X}, {"Y": 16}))
    with pytest.raises(ModelError, match=r"has not begun; enter it first: with session.open\(request\) as call"):
        plain.output("Y", (4,), np.float32)
    assert not plain.is_open


MANY = 512
STRIDE = 64 * MANY


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(slots=MAX_FRAMES + 1, share=STRIDE, record_byte_size=1 << 16)
    yield client
    client.close()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For which places outputs were laid out, or records looked up."""
    made: list[int] = []
    outputs, record = Ring.outputs, ManagedRegion.record

    def noting_outputs(ring: Ring, first: Mapping[str, OutputSpan], place: int) -> dict[str, OutputSpan]:
        made.append(place)
        return outputs(ring, first, place)

    def noting_record(region: ManagedRegion, slot: int) -> SlotRecord:
        if slot:
            made.append(slot - 1)
        return record(region, slot)

    monkeypatch.setattr(Ring, "outputs", noting_outputs)
    monkeypatch.setattr(ManagedRegion, "record", noting_record)
    return made


def ring_of(client: Client, *names: str) -> InferenceRequest:
    rooms = {name: OutputSpan(0, client.data + 64 * number, 16) for number, name in enumerate(names)}
    return delivered(client.begin(Table({}, rooms, ring=Ring(1, MAX_FRAMES, STRIDE))), list(names))


@pytest.mark.parametrize("is_first", [True, False])
def test_unknown_outputs_cost_nothing(open_session: Open, client: Client, places: list[int], is_first: bool) -> None:
    unknown = [f"O{number}" for number in range(MANY - 1)]
    request = ring_of(client, *unknown, "Y") if is_first else ring_of(client, "Y", *unknown)
    executed: list[StreamCall] = []
    streaming(open_session).serve_streams([request], executed.append)
    (sent,) = answers_to(request).sent
    assert message_of(sent) == "shm:tensor: model 'm' has no output 'O0'; it has Y"
    assert (places, executed) == ([], [])
    assert client.region.record(0).started == 0
    assert client.is_free()


def test_known_outputs_are_laid_out_for_each_place(open_session: Open, client: Client, places: list[int]) -> None:
    request = ring_of(client, "Y")
    streaming(open_session).serve_streams([request], putting(1))
    assert [message_of(sent) for sent in answers_to(request).sent] == ["", ""]
    assert set(places) == set(range(MAX_FRAMES))


def test_a_cancelled_stream_ends_quietly(open_session: Open, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LOOK_AT_CLIENT_S", 0)
    request = client.request({"X": X}, {"Y": 16})
    answers_to(request).is_given_up = True
    found: list[Any] = []

    def answer(call: StreamCall) -> Iterator[None]:
        try:
            yield from putting(5)(call)
        finally:
            found.append((call.input("X").numpy().tolist(), len(answers_to(request).sent)))

    streaming(open_session).serve_streams([request], answer)
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

    serving = serve_one(call, infer, lambda call, error: call.fail(error))

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
