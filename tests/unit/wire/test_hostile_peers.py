"""Calls over gRPC to servers that break off, stall, or speak otherwise: one error, in time, nothing sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from shm_backend_utils.client import ConnectionLostError, DeadlineExceededError, InferenceError, ServerUnavailableError
from shm_backend_utils.client.transports import connections
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.client.transports.transport import connect, connect_async
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER
from tests.unit.test_closed_transports import OnLoop
from tests.unit.wire.peers import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    TRAILERS,
    H2Peer,
    Listener,
    answering,
    block,
    frame,
    message,
    requests_of,
)

PATIENCE_S = 10.0
LAST = {"triton_final_response": service_pb2.InferParameter(bool_param=True)}
RESPONSE = service_pb2.ModelInferResponse(parameters=LAST)
ANSWER = message(service_pb2.ModelStreamInferResponse(infer_response=RESPONSE).SerializeToString())
"""The last response of a stream. Other calls read it as a message without a known field."""
ANSWERED = service_pb2.ModelConfigResponse.FromString(ANSWER[5:])
HEADS = block(HEADERS), block(TRAILERS)
GOODBYE = frame(7, 0, 0, bytes(8))
ONE_AT_A_TIME = frame(4, 0, 0, bytes((0, 3, 0, 0, 0, 1)))
Serve = Callable[[socket.socket], None]
Connect = Callable[[str], Any]


def stream_of(transport: Any, timeout_s: float = PATIENCE_S) -> Iterator[Any]:
    request = service_pb2.ModelInferRequest()
    request.parameters[SLOT_PARAMETER].string_param = "slot"
    answers: Iterator[Any] = transport.stream(GrpcMessage("ModelStreamInfer", request), timeout_s)
    return answers


class AsStreams:
    """A transport whose calls are streams of one answer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.codec = inner.codec
        self.close = inner.close

    def send(self, _: Any, timeout_s: float) -> Any:
        assert not list(stream_of(self._inner, timeout_s))
        return ANSWERED


@pytest.fixture(params=["threads", "streams", "tasks"])
def connected(request: pytest.FixtureRequest) -> Iterator[Connect]:
    ends: list[Callable[[], None]] = []

    def connected(url: str) -> Any:
        transport: Any = OnLoop(url) if request.param == "tasks" else connect(url, None)
        ends.append(transport.end if request.param == "tasks" else transport.close)
        return AsStreams(transport) if request.param == "streams" else transport

    yield connected
    for end in ends:
        end()


def ask(transport: Any, timeout_s: float = PATIENCE_S) -> Any:
    return transport.send(transport.codec.ask("model config", "m"), timeout_s)


def answer_to(stream: int, content: bytes = ANSWER, heads: tuple[bytes, bytes] = HEADS) -> bytes:
    first, last = heads
    data = frame(0, 0, stream, content)
    return frame(1, END_HEADERS, stream, first) + data + frame(1, END_HEADERS | END_STREAM, stream, last)


def counting(requests: list[int]) -> Callable[[int], bytes]:

    def answer(stream: int) -> bytes:
        requests.append(stream)
        return answer_to(stream)

    return answer


def staying(data: Callable[[int], bytes]) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(SETTINGS)
        next_request = requests_of(connection)
        while True:
            connection.sendall(data(next_request()))

    return serve


def leaving(data: Callable[[int], bytes]) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(SETTINGS)
        connection.sendall(data(requests_of(connection)()))
        connection.shutdown(socket.SHUT_RDWR)

    return serve


def at_once(data: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(data)
        while connection.recv(1 << 16):
            pass

    return serve


def flood(data: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(SETTINGS)
        requests_of(connection)()
        while True:
            connection.sendall(data)

    return serve


def drip(connection: socket.socket) -> None:
    connection.sendall(SETTINGS)
    stream = requests_of(connection)()
    for byte in answer_to(stream) * 100:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


HOSTILE: dict[str, tuple[Serve, type[Exception]]] = {
    "HTTP/1": (at_once(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ServerUnavailableError),
    "TLS": (at_once(b"\x15\x03\x03\x00\x02\x02\x32" + bytes(9)), ServerUnavailableError),
    "hangs up at once": (lambda connection: None, ServerUnavailableError),
    "hangs up on a request": (leaving(lambda _: b""), ConnectionLostError),
    "hangs up within the answer": (leaving(lambda stream: answer_to(stream)[:-3]), ConnectionLostError),
    "a frame beyond the limit": (staying(lambda _: frame(0, 0, 1, bytes(20000))), ServerUnavailableError),
    "a reset": (staying(lambda stream: frame(3, 0, stream, bytes((0, 0, 0, 2)))), ConnectionLostError),
    "an answer that cannot be read": (staying(lambda stream: answer_to(stream, message(b"\xff\xff"))), InferenceError),
    "a status of 5000 digits": (
        staying(lambda stream: answer_to(stream, heads=(b"", block([("grpc-status", "1" * 5000)])))),
        ServerUnavailableError,
    ),
    "silence": (at_once(b""), DeadlineExceededError),
    "silence after settings": (at_once(SETTINGS), DeadlineExceededError),
    "no room for calls": (at_once(frame(4, 0, 0, bytes((0, 3, 0, 0, 0, 0)))), ServerUnavailableError),
    "settings without end": (flood(SETTINGS * 1000), DeadlineExceededError),
    "questions without end": (flood(frame(6, 0, 0, bytes(8)) * 1000), DeadlineExceededError),
    "drips": (drip, DeadlineExceededError),
}
BEHIND_THE_LAST_RESPONSE = [HOSTILE[what][0] for what in ("hangs up within the answer", "a status of 5000 digits")]


@pytest.mark.parametrize(("serve", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_a_call_ends_by_its_error_in_time(connected: Connect, serve: Serve, expected: type[Exception]) -> None:
    requests = []

    def counted(connection: socket.socket) -> None:
        requests.append(connection)
        serve(connection)

    with Listener(counted) as listener:
        transport = connected(listener.url)
        begin = time.monotonic()
        if isinstance(transport, AsStreams) and serve in BEHIND_THE_LAST_RESPONSE:
            pytest.skip("a stream has ended by then")
        with pytest.raises(expected) as failure:
            ask(transport, 0.5 if expected is DeadlineExceededError else PATIENCE_S)
        assert type(failure.value) is expected
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert len(requests) == 1, "it was sent again"
        assert str(failure.value).count(listener.url) <= 1, "it is told twice"


@pytest.mark.parametrize("serve", BEHIND_THE_LAST_RESPONSE)
def test_a_stream_ends_well_if_its_server_breaks_off_behind_the_last_response(serve: Serve) -> None:
    with Listener(serve) as listener, contextlib.closing(connect(listener.url, None)) as transport:
        ask(AsStreams(transport))


def test_calls_that_had_not_begun_are_sent_again(connected: Connect) -> None:
    """A server says goodbye to a call that it has not seen, refuses the next, and answers it on a third connection."""
    refusal: Callable[[int], bytes] = lambda stream: frame(3, 0, stream, bytes((0, 0, 0, 7))) + GOODBYE  # noqa: E731
    behaviours = iter([staying(each) for each in (lambda _: GOODBYE, refusal, answer_to)])
    with Listener(lambda connection: next(behaviours)(connection)) as listener:  # noqa: PLW0108  # one for each
        transport = connected(listener.url)
        assert ask(transport) == ANSWERED
        assert listener.accepted == 3


def test_one_that_never_begins_is_not_sent_for_ever(connected: Connect) -> None:
    with Listener(staying(lambda _: GOODBYE)) as listener:
        with pytest.raises(ServerUnavailableError, match="GOAWAY"):
            ask(connected(listener.url))
        assert listener.accepted == 3


@pytest.mark.parametrize("last_words", [b"", frame(6, 0, 0, bytes(8))])
def test_a_connection_that_ended_between_two_calls_is_replaced(connected: Connect, last_words: bytes) -> None:
    with Listener(leaving(lambda stream: answer_to(stream) + last_words)) as listener:
        transport = connected(listener.url)
        for count in range(1, 5):
            ask(transport)
            assert listener.accepted == count
            time.sleep(0.05)  # in which the server hangs up


def test_what_is_said_between_two_calls_is_heard(connected: Connect) -> None:
    chatter = frame(6, 0, 0, bytes(8)) + frame(8, 0, 0, bytes((0, 0, 1, 0))) + SETTINGS
    with Listener(staying(lambda stream: answer_to(stream) + chatter)) as listener:
        transport = connected(listener.url)
        for _ in range(20):
            ask(transport)
        assert listener.accepted == 1


@pytest.mark.parametrize(
    "serve",
    [
        HOSTILE["no room for calls"][0],
        staying(lambda stream: answer_to(stream) + frame(7, 0, 0, bytes((0, 0, 0, stream)) + bytes(4))),
    ],
)
def test_a_connection_that_takes_no_more_calls_is_closed(connected: Connect, serve: Serve) -> None:
    ended = threading.Semaphore(0)

    def counted(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            serve(connection)
        ended.release()

    with Listener(counted) as listener:
        transport = connected(listener.url)
        for _ in range(3):
            with contextlib.suppress(ServerUnavailableError):
                ask(transport)
        with contextlib.suppress(ServerUnavailableError):
            ask(transport)  # before this one, threads hear of the last goodbye
        assert [ended.acquire(timeout=PATIENCE_S) for _ in range(3)] == [True] * 3


def test_the_next_address_is_tried_if_one_is_lacked_or_silent(
    connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # and then nobody is let in
            stack.enter_context(waiting := socket.socket()).setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        lacked = (socket.AF_APPLETALK, socket.SOCK_STREAM, 0, "", ("::1", 1, 0, 0))
        silent = (socket.AF_INET, socket.SOCK_STREAM, 0, "", deaf.getsockname())
        with Listener(staying(answer_to)) as listener:
            transport = connected(listener.url.replace("127.0.0.1", "localhost"))
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: [lacked, silent, *look_up(*args, **more)])
            assert ask(transport, 3.0) == ANSWERED


def test_a_call_whose_client_is_closed_while_it_connects_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    connect_to = connections._connected

    def meanwhile(*args: Any) -> socket.socket:
        connection = connect_to(*args)
        transport.close()
        return connection

    monkeypatch.setattr(connections, "_connected", meanwhile)
    with Listener(staying(counting(requests))) as listener:
        transport = connect(listener.url, None)
        with pytest.raises(ClosedError):
            ask(transport)
    assert requests == []


def test_a_late_answer_is_nobodys(connected: Connect) -> None:
    may_answer = threading.Event()

    def answer(peer: H2Peer, stream: int, _: bytes) -> None:
        if stream == 1 and not may_answer.wait(0.4):
            may_answer.set()
        peer.send(stream, ANSWER)

    with Listener(answering(answer)) as listener:
        transport = connected(listener.url)
        with pytest.raises(DeadlineExceededError):
            ask(transport, 0.2)
        assert ask(transport) == ANSWERED


@pytest.mark.parametrize("connected", ["threads", "tasks"], indirect=True)
def test_large_requests_wait_for_their_windows(connected: Connect) -> None:
    sizes: list[int] = []

    def answer(peer: H2Peer, stream: int, received: bytes) -> None:
        sizes.append(len(received))
        peer.send(stream, ANSWER)

    with Listener(answering(answer)) as listener:
        transport = connected(listener.url)
        message = transport.codec.load("m", {"file:1/x": bytes(700_000)})
        with ThreadPoolExecutor(4) as threads:
            for sent in [threads.submit(transport.send, message, PATIENCE_S) for _ in range(8)]:
                sent.result()
        assert sizes == [5 + message.request.ByteSize()] * 8


def test_tasks_on_a_server_that_takes_one_call_at_a_time() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(ONE_AT_A_TIME)
        next_request = requests_of(connection)
        while True:
            stream = next_request()
            time.sleep(0.02)
            connection.sendall(answer_to(stream))

    async def main(url: str) -> None:
        transport = connect_async(url, None)
        for _ in range(2):
            await asyncio.gather(*[transport.send(transport.codec.ask("model config"), PATIENCE_S) for _ in range(20)])
        await transport.close()

    with Listener(serve) as listener:
        asyncio.run(main(listener.url))
        assert listener.accepted <= 20


def test_room_that_late_calls_leave_is_used() -> None:
    async def main(url: str) -> None:
        transport = connect_async(url, None)
        for _ in range(5):
            late = [transport.send(transport.codec.ask("model config"), 0.05) for _ in range(2)]
            await asyncio.gather(*late, return_exceptions=True)
        await transport.close()

    with Listener(at_once(ONE_AT_A_TIME)) as listener:
        asyncio.run(main(listener.url))
        assert listener.accepted == 2


@pytest.mark.parametrize("connected", ["threads", "tasks"], indirect=True)  # a stream has no time as a whole
def test_without_time_nothing_is_sent(connected: Connect) -> None:
    requests: list[int] = []
    with Listener(staying(counting(requests))) as listener:
        transport = connected(listener.url)
        ask(transport)
        with pytest.raises(DeadlineExceededError):
            ask(transport, -1.0)
        ask(transport)
    assert len(requests) == 2
