"""Calls without the model's answer: no memory is used that it may still write to; what began is not sent again."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, ServerUnavailableError, ShmClient, short
from shm_backend_utils.client.errors import ConnectionLostError, translated
from shm_backend_utils.client.paths.call import is_answer
from shm_backend_utils.client.paths.choice import PathChooser
from shm_backend_utils.client.paths.direct import DirectCall
from shm_backend_utils.client.paths.triton_shm import InlineCall, RegisteredCall
from shm_backend_utils.client.steps import Steps
from shm_backend_utils.client.transports.http.codec import Answer
from shm_backend_utils.errors import ClosedError, PeerError, SlotInUseError, StaleRequestError, refusal
from shm_backend_utils.model.call.checks import shares_no_memory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.call_layout import ALIGNMENT
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from tests.opened import open_region
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)
LONG_S = 10.0


@pytest.mark.parametrize("body", [b"<html>Gateway Timeout</html>", b'{"message": "timeout"}', b""])
def test_a_gateways_answer_says_nothing_of_the_request_and_tritons_is_one(body: bytes) -> None:
    for status in (502, 503, 504):
        error = Answer(status, {}, body).error("http://localhost")
        assert isinstance(error, ConnectionLostError)
        assert not is_answer(error)
        assert error.status() == str(status)
        assert b"html" not in body or "Gateway Timeout" in str(error), "its page is shown"
    for status in (400, 404, 413, 500, 503):
        error = Answer(status, {}, b"" if status == 413 else b'{"error": "not ready"}').error("http://localhost")
        assert error is not None
        assert is_answer(error)


def test_a_proxys_answer_over_grpc_says_nothing_of_the_request() -> None:
    said = ["Received http2 header with status: 504", "upstream request timeout", "upstream connect error or reset"]
    for text in said:
        assert isinstance(translated("StatusCode.UNAVAILABLE", text, "grpc://localhost"), ServerUnavailableError)
    assert is_answer(translated("StatusCode.UNAVAILABLE", "Request for unknown model: 'm' is not ready", "there"))


@pytest.mark.parametrize("version", ["2.50.0", "2.49.0"])
def test_memory_given_up_is_not_used_again(monkeypatch: pytest.MonkeyPatch, server: FakeServer, version: str) -> None:
    server.version = version
    with client_of(server, "http") as client:
        transport, send = client._driver.transport, client._driver.transport.send
        late: list[Any] = []

        def give_up(message: Any, timeout_s: float) -> Any:
            if not message.path.endswith("infer"):
                return send(message, timeout_s)
            late.append(message)
            raise cast(Exception, Answer(504, {}, b"Gateway Timeout").error("http://localhost"))

        client.infer("m", {"IN0": X}, path="triton-shm").release()
        with monkeypatch.context() as patch:
            patch.setattr(transport, "send", give_up)
            with pytest.raises(ConnectionLostError):
                client.infer("m", {"IN0": X}, path="triton-shm")
        result = client.infer("m", {"IN0": X}, path="triton-shm")["OUT0"]
        assert len(server.registered) == (2 if version == "2.49.0" else 1), "an old one crashes of unregistering"
        server.compute = lambda order, inputs: {"OUT0": inputs["IN0"] * 0 - 1}
        with contextlib.suppress(Exception):  # the memory is not registered any more
            send(late[0], LONG_S)
        np.testing.assert_array_equal(result, X * 2)
        server.before = lambda order: client.close()
        with contextlib.suppress(Exception):
            client.infer("m", {"IN0": X}, path="triton-shm")
        assert len(server.registered) == (2 if version == "2.49.0" else 0), "also during a request"


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
        server.compute = lambda *_: {}
        with pytest.raises(PeerError, match="model 'm' answered without output 'OUT0'"):
            client.infer("m", {"IN0": X}, path="inline")


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


def busy(_: Order) -> None:
    raise InferenceError(refusal(SlotInUseError("the slot is in use")), "StatusCode.CANCELLED")


def test_a_call_whose_slot_is_busy_is_sent_again_in_other_memory(server: FakeServer) -> None:
    server.before = lambda order: busy(order) if len(server.orders) == 1 else None
    with client_of(server) as client:
        np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)
        assert client.stats().failures == 0
    first, second = [order.parameters[SLOT_PARAMETER] for order in server.orders]
    assert first != second


SHAPES = {"IN0": ((6,), np.float32)}


def infer_prepared(server: FakeServer, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
    with client_of(server) as client, client.prepare("m", SHAPES) as call:
        call.inputs["IN0"][...] = X
        array: np.ndarray[Any, Any] = call.infer(timeout_s=timeout_s)["OUT0"].copy()
        return array


def infer(server: FakeServer) -> None:
    with client_of(server) as client:
        client.infer("m", {"IN0": X})


def test_a_prepared_call_whose_slot_is_busy_is_sent_again_in_its_own_memory(server: FakeServer) -> None:
    server.before = lambda order: busy(order) if len(server.orders) < 3 else None
    np.testing.assert_array_equal(infer_prepared(server), 2 * X)
    assert len({order.parameters[SLOT_PARAMETER] for order in server.orders}) == 1
    generations = [order.parameters[GENERATION_PARAMETER] for order in server.orders]
    assert len(set(generations)) == 3, "each is executed once at the most"


@pytest.mark.parametrize("infer", [infer_prepared, infer])
@pytest.mark.parametrize("delay_s", [0.001, 0.2], ids=["soon", "much later"])
def test_a_request_sent_twice_is_not_repeated(server: FakeServer, infer: Callable[..., object], delay_s: float) -> None:
    """The second is refused because the first holds the slot. It has not begun yet, but will."""
    with contextlib.ExitStack() as stack:

        def refuse_the_second(order: Order) -> None:
            address = parse_address(order.parameters[SLOT_PARAMETER])
            region = open_region(address.key, address.token, "region")
            stack.callback(region.close)
            lease = region.lease(address.slot)
            assert lease.take()

            def execute_the_first() -> None:
                region.record(address.slot).model_words[0] = order.parameters[GENERATION_PARAMETER]
                lease.give_back()

            first = threading.Timer(delay_s, execute_the_first)
            first.start()
            stack.callback(first.join)
            busy(order)

        server.before = refuse_the_second
        with pytest.raises(InferenceError, match="shm:busy: "):
            infer(server)
    assert len(server.orders) == 1


def refuse_late(order: Order) -> None:
    time.sleep(0.1)
    busy(order)


def start_and_refuse(order: Order) -> None:
    address = parse_address(order.parameters[SLOT_PARAMETER])
    with contextlib.closing(open_region(address.key, address.token, "region")) as region:
        region.record(address.slot).model_words[0] = order.parameters["shm_generation"]
    busy(order)


def refusing(said: str) -> Callable[[Order], None]:
    def refuse(_: Order) -> None:
        raise InferenceError(said, "StatusCode.CANCELLED")

    return refuse


GIVEN_UP = refusal(StaleRequestError("the client has given it up"))
ENDS: list[tuple[Callable[[Order], None], str, int]] = [
    (busy, "shm:busy: ", 4),
    (start_and_refuse, "shm:busy: ", 1),
    *((refusing(said), said, 1) for said in ("the model has no time", GIVEN_UP)),
]


@pytest.mark.parametrize(
    ("infer", "before", "said", "count"),
    [(infer, *end) for infer in (infer_prepared, infer) for end in ENDS]
    + [(partial(infer_prepared, timeout_s=0.05), refuse_late, "shm:busy: ", 1)],
)
def test_a_call_is_not_sent_again_for_ever_too_late_when_it_has_begun_or_was_refused(
    server: FakeServer, infer: Callable[..., object], before: Callable[[Order], None], said: str, count: int
) -> None:
    server.before = before
    with pytest.raises(InferenceError, match=said):
        infer(server)
    assert len(server.orders) == count


def with_paths(paths: str) -> dict[str, Any]:
    return config("m", parameters={"SHM_PATHS": {"string_value": paths}} if paths else {})


NO_SLOT, NO_SLOT_OF_ANOTHER = [
    refusal(shares_no_memory(ModelSpec.of_server(name, config(name)))) for name in ("m", "called by m")
]
BROKEN = "shm:table: record: found too many bytes, expected fewer"


@pytest.mark.parametrize("before", ["inline", "direct", "triton-shm", "direct,inline"])
@pytest.mark.parametrize("after", [*map(with_paths, ["inline", "direct", ""]), config("m", dims="3"), {}])
@pytest.mark.parametrize("said", ["model.py failed", BROKEN, NO_SLOT_OF_ANOTHER, f"quoted: {NO_SLOT}"])
def test_what_has_run_is_not_sent_to_the_models_successor(before: str, after: dict[str, Any], said: str) -> None:
    ran: list[Order] = []

    def compute(order: Order, _: Arrays) -> Any:
        ran.append(order)
        server.configs = {"m": after} if after else {}
        raise InferenceError(said, "StatusCode.INTERNAL")

    with (
        FakeServer(with_paths(before), compute=compute) as server,
        client_of(server, inline_bytes=0) as client,
        pytest.raises(InferenceError, match=re.escape(said)),
    ):
        client.infer("m", {"IN0": X})
    assert len(ran) == 1


@pytest.mark.parametrize("path", ["inline", "triton-shm"])
def test_what_the_models_session_has_refused_for_its_path_is_sent_again(path: str) -> None:
    def refuse(order: Order) -> None:
        if SLOT_PARAMETER not in order.parameters:
            server.configs["m"] = with_paths("direct")
            raise InferenceError(NO_SLOT, "StatusCode.INVALID_ARGUMENT")

    with FakeServer(with_paths(path)) as server, client_of(server, inline_bytes=0) as client:
        server.before = refuse
        assert outcomes(client, 1, IN0=X) == ["direct"]
    assert len(server.orders) == 2


def test_a_request_still_on_its_way_is_stale_before_its_call_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a gateway that gives up waiting for the server, and says so as the server would."""
    generations: list[int] = []
    choose = PathChooser.choose

    def look_and_choose(*arguments: Any) -> Steps[str]:
        for order in server.orders:
            address = parse_address(order.parameters[SLOT_PARAMETER])
            with contextlib.closing(open_region(address.key, address.token, "region")) as region:
                generations.append(region.record(address.slot).generation - order.parameters[GENERATION_PARAMETER])
        return choose(*arguments)

    def refuse(_: Order) -> None:
        server.before, server.configs["m"] = lambda _: None, with_paths("direct,inline")
        raise InferenceError("no upstream", "StatusCode.INTERNAL")

    with FakeServer(with_paths("direct")) as server, client_of(server, inline_bytes=0) as client:
        server.before = refuse
        monkeypatch.setattr(PathChooser, "choose", look_and_choose)
        assert outcomes(client, 1, IN0=X) == ["direct"]
    assert generations == [1]


def test_results_of_another_generation_are_refused(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(server, path="direct", inline_bytes=0) as client:
        client.infer("m", {"IN0": X}, outputs={"OUT0": 24}).release()
        monkeypatch.setattr(server, "_in_slot", lambda order: {})
        with pytest.raises(PeerError, match="without having used the shared memory"):
            client.infer("m", {"IN0": 10 * X}, outputs={"OUT0": 24})


def test_a_frame_of_another_number_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(model, compute=lambda _, inputs: [{"OUT0": X}] * 2) as server, client_of(server) as client:
        answers = server.stream
        monkeypatch.setattr(server, "stream", lambda order: itertools.chain(answers(order), [{}]))
        stream = iter(client.stream("m", {"IN0": X}, outputs={"OUT0": X.nbytes}, frames=2))
        for _ in range(2):
            next(stream).release()
        with pytest.raises(PeerError, match="without having used the shared memory"):
            next(stream)


def test_a_frame_on_inputs_is_copied_and_one_on_the_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter((lambda offset: offset - ALIGNMENT, lambda _: ALIGNMENT))  # the input lies before the first frame
    encode = results.encode

    def encode_elsewhere(written: list[results.OutputPlace]) -> bytes:
        place = next(places)
        return encode([each._replace(offset=place(each.offset)) for each in written])

    monkeypatch.setattr(results, "encode", encode_elsewhere)
    model = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(model, compute=lambda _, inputs: [{"OUT0": X}] * 2) as server, client_of(server) as client:
        stream = iter(client.stream("m", {"IN0": X}, outputs={"OUT0": X.nbytes}, frames=2))
        assert next(stream)["OUT0"].flags.owndata
        with pytest.raises(PeerError, match=f"offset {ALIGNMENT} that are not the request's"):
            next(stream)


@pytest.mark.parametrize("kind", [DirectCall, RegisteredCall, InlineCall, short])
def test_a_client_that_closes_sends_nothing(server: FakeServer, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    with client_of(server, inline_bytes=0) as client:
        if kind is short:  # which calls are once the model is known
            client.infer("m", {"IN0": X})
        monkeypatch.setattr(kind, "assemble" if kind is short else "write", lambda *_: client.close())
        with pytest.raises(ClosedError, match="this client"):
            client.infer("m", {"IN0": X}, path="auto" if kind is short else kind.path)
    assert len(server.orders) == (kind is short)


@pytest.mark.parametrize("moment", ["before", "between two inputs"])
@pytest.mark.parametrize("kind", [DirectCall, RegisteredCall])
def test_a_closed_call_copies_nothing(monkeypatch: pytest.MonkeyPatch, kind: Any, moment: str) -> None:
    write, copy, same = kind.write, np.copyto, []

    def late(call: Any, given: Any) -> None:
        def copy_and_close(*arguments: Any, **named: Any) -> None:
            copy(*arguments, **named)
            call.close()

        memory = call.memory
        before = memory.tobytes()
        if moment == "before":
            call.close()
        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", copy_and_close)
            write(call, given)
        same.append(memory.tobytes() == before)

    with FakeServer(config("m", count=2)) as server, client_of(server, inline_bytes=0) as client:
        monkeypatch.setattr(kind, "write", late)
        with pytest.raises(ClosedError, match="this call"):
            client.infer("m", {"IN0": X + 1, "IN1": X}, path=kind.path)
    assert same == [moment == "before"]
