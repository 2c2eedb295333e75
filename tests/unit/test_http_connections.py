"""Connections over HTTP, against servers that do what Triton seldom does; how many are kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import operator
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ConnectionLostError, DeadlineExceededError, InferenceError, ServerUnavailableError
from shm_backend_utils.client.options import Tls
from shm_backend_utils.client.transports import aio_connections
from shm_backend_utils.client.transports.http.codec import Answer, HttpMessage
from shm_backend_utils.client.transports.http.transport import Http1, Request
from shm_backend_utils.client.transports.transport import Transport, connect, connect_async
from shm_backend_utils.errors import ClosedError
from tests.e2e.eventually import eventually
from tests.e2e.test_unreachable import make_certificate
from tests.unit.test_closed_transports import OnLoop
from tests.unit.wire.peers import Listener

OK = b"HTTP/1.1 200 OK\r\n"
TEN = OK + b"Content-Length: 10\r\n\r\n0123456789"


class Peer(Listener):
    """A server that reads a request and then does what the test says, once for each request of a connection."""

    def __init__(self, behaviour: Callable[[socket.socket], None]) -> None:
        self.requests: list[bytes] = []

        def serve(stream: socket.socket) -> None:
            while request := stream.recv(1 << 16):  # the tests' requests come in one piece
                self.requests.append(request)
                behaviour(stream)

        super().__init__(serve)
        self.address = self.url.removeprefix("grpc://")


@contextmanager
def connections_to(behaviour: Callable[[socket.socket], None], base: str = "") -> Iterator[tuple[Peer, Transport]]:
    with Peer(behaviour) as peer, contextlib.closing(connect(f"http://{peer.address}{base}", None)) as connections:
        yield peer, connections


def get(connections: Transport, timeout_s: float = 10) -> Answer:
    answer: Answer = connections.send(HttpMessage("GET", "/v2"), timeout_s)
    return answer


def idle_in(connections: Any) -> list[Any]:
    idle: list[Any] = connections._connections._idle
    return idle


def answer_ten(stream: socket.socket) -> None:
    stream.sendall(TEN)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names are not wanted


def test_a_connection_is_used_again_unless_the_server_closed_it_meanwhile() -> None:
    with connections_to(answer_ten, base="/behind/here") as (peer, connections):  # Triton may be behind a path
        assert [get(connections).body for _ in range(3)] == [b"0123456789"] * 3
        assert peer.requests[0].startswith(b"GET /behind/here/v2 HTTP/1.1\r\n")
        assert peer.accepted == 1
        for _ in range(20):
            peer.hang_up()
            assert get(connections).body == b"0123456789"
        assert (peer.accepted, len(idle_in(connections))) == (21, 1)


CHUNKS = b"6\r\nshared\r\n7\r\n memory\r\n0\r\nX: 2\r\n\r\n"  # trailers are no headers


@pytest.mark.parametrize(
    ("headers", "sent", "accepted"),
    [({b"Connection": b"close"}, b"shared memory", 2), ({b"X": b"1", b"Transfer-Encoding": b"chunked"}, CHUNKS, 1)],
)
def test_an_answer_without_a_length_comes_whole(headers: dict[bytes, bytes], sent: bytes, accepted: int) -> None:
    def answer(stream: socket.socket) -> None:
        stream.sendall(OK + b"".join(b"%b: %b\r\n" % header for header in headers.items()) + b"\r\n" + sent[:9])
        stream.sendall(sent[9:])
        if accepted > 1:
            stream.shutdown(socket.SHUT_RDWR)

    with connections_to(answer) as (peer, connections):
        assert [get(connections) for _ in range(2)] == [Answer(200, headers, b"shared memory")] * 2
        assert peer.accepted == accepted


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK, b"X-More: 1\r\n"),
        (OK + b"Content-Length: 1000\r\n\r\n", b"."),
        (OK + b"Content-Length: 10000000\r\n\r\n", b"."),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n.\r\n"),
        (OK + b"Connection: close\r\n\r\n", b"."),
    ],
    ids=range(6),
)
def test_a_server_whose_answer_drips_is_not_waited_for_longer_than_the_timeout(begin: bytes, drop: bytes) -> None:
    stop = threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.sendall(begin)
        for _ in range(80):  # some parts may be no longer
            if stop.wait(0.03):
                return
            stream.sendall(drop)

    with connections_to(answer) as (_, connections):
        with pytest.raises(DeadlineExceededError):
            get(connections, 0.3)
        stop.set()


def test_nor_is_one_that_reads_slowly_and_what_was_to_be_sent_is_let_go_of() -> None:
    stop = threading.Event()

    def read(stream: socket.socket) -> None:
        while not stop.wait(0.02) and stream.recv(1 << 16):
            pass

    body = np.zeros(32 << 20, np.uint8)
    sent = weakref.ref(body)
    gc.disable()  # a client's memory must not wait for it
    try:
        with connections_to(read) as (_, connections):
            begin = time.monotonic()
            with pytest.raises(DeadlineExceededError):
                connections.send(HttpMessage("POST", "/v2", (body.data,)), 0.3)
            assert time.monotonic() - begin < 1.0
            stop.set()
            del body
            assert sent() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("length", [100, 8 << 20])
def test_an_answer_that_is_cut_off_is_none_nor_is_the_one_before(length: int) -> None:
    whole = [b"HTTP/1.1 204 No Content\r\n\r\n"]

    def answer(stream: socket.socket) -> None:
        stream.sendall(whole.pop() if whole else OK + b"Content-Length: %d\r\n\r\n%b" % (length, bytes(length - 1)))
        if len(peer.requests) > 1:
            stream.shutdown(socket.SHUT_RDWR)

    with connections_to(answer) as (peer, connections):
        with pytest.raises(InferenceError):
            get(connections)
        with pytest.raises(ConnectionLostError):
            get(connections)


def test_a_late_answer_is_not_taken_for_the_next_ones() -> None:
    may_answer = threading.Event()
    answers = iter([b"late", b"mine"])

    def answer(stream: socket.socket) -> None:
        mine = next(answers)
        if mine == b"late":
            may_answer.wait(10)
        stream.sendall(OK + b"Content-Length: 4\r\n\r\n" + mine)

    with connections_to(answer) as (peer, connections):
        with pytest.raises(DeadlineExceededError):
            get(connections, 0.2)
        may_answer.set()
        assert get(connections).body == b"mine"
        assert peer.accepted == 2


def test_who_hangs_up_speaks_another_protocol_or_does_not_listen_is_told_apart() -> None:
    hang_up = connections_to(lambda stream: stream.shutdown(socket.SHUT_RDWR))
    with hang_up as (_, connections), pytest.raises(ConnectionLostError, match="may have run"):
        get(connections)
    change = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    for words in (b"220 smtp.example ready\r\n", change):
        greet = connections_to(operator.methodcaller("sendall", words))
        with greet as (_, connections), pytest.raises(ServerUnavailableError):
            get(connections)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    with pytest.raises(ServerUnavailableError, match="no Triton server answers"):
        get(connect(f"http://{host}:{port}", None))
    for count, reason in ((0, "BadStatusLine"), (1, "more came than an answer")):  # to who speaks unasked
        conversation = Http1()
        for _ in range(count):
            conversation.begin(Request((b"GET / HTTP/1.1\r\n\r\n",), math.inf), 1)
            conversation.receive(TEN)
        conversation.receive(b"\x00\x00\x12\x04")
        assert reason in conversation.failure


@pytest.mark.parametrize("begin", [b"", OK + b"Connection: close\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_connection_in_use_ends_and_what_had_come_is_no_answer(begin: bytes) -> None:
    has_begun = threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.sendall(begin)
        has_begun.set()

    with connections_to(answer) as (_, connections), ThreadPoolExecutor(1) as thread:
        before = descriptors()
        pending = thread.submit(get, connections)
        has_begun.wait(10)
        connections.close()
        with pytest.raises(ClosedError):
            pending.result()
        eventually(lambda: descriptors() <= before)  # the peer has noticed too


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("connected", [connect, OnLoop], ids=["threads", "tasks"])
def test_bodies_may_be_larger_than_a_socket_takes_at_once(
    connected: Callable[[str, Tls], Any], scheme: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    key, certificate = make_certificate(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    body = os.urandom(9 << 20)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) if scheme == "https" else connection as stream:
            while request := stream.recv(1 << 16):
                left = len(body) - len(request.partition(b"\r\n\r\n")[2])
                while left > 0 and (received := stream.recv(1 << 20)):
                    left -= len(received)
                stream.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (OK, len(body), body))

    with Listener(serve) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio_connections, "_MOST_UNSENT", 1 << 20)
        transport = connected(listener.url.replace("grpc", scheme), Tls(str(certificate)))
        assert [transport.send(HttpMessage("POST", "/v2", (body,)), 10).body == body for _ in range(3)] == [True] * 3
        assert listener.accepted == 1
        getattr(transport, "end", gc.collect)()
        del transport  # which nobody has closed, if it is for threads
        gc.collect()
    assert [str(each.message) for each in recwarn] == []


AT_ONCE = 6


def test_calls_without_end_keep_as_many_connections_as_there_were_calls_at_once() -> None:
    everybody = threading.Barrier(AT_ONCE)

    def answer(stream: socket.socket) -> None:
        everybody.wait(10)
        answer_ten(stream)

    with connections_to(answer) as (peer, connections):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for _ in range(10):
                for future in [threads.submit(get, connections) for _ in range(AT_ONCE)]:
                    assert future.result().body == b"0123456789"
        assert peer.accepted == len(idle_in(connections)) == AT_ONCE
        connections.close()
        assert idle_in(connections) == []


@pytest.mark.parametrize("moment", ["connect", "answer"])
def test_a_cancelled_task_leaves_its_connection_in_use(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    async def main(address: str) -> None:
        transport = connect_async(f"http://{address}", None)
        line = aio_connections._Connection
        connect_to, receive = aio_connections.AsyncConnections._opened, line.data_received
        for _ in range(5):
            task = asyncio.ensure_future(transport.send(HttpMessage("GET", "/v2"), 10))

            async def connected(self: Any, task: Any = task) -> Any:
                found = await connect_to(self)
                task.cancel()
                return found

            def received(self: Any, data: bytes, task: Any = task) -> None:
                receive(self, data)
                if data:
                    task.cancel()

            if moment == "connect":
                monkeypatch.setattr(aio_connections.AsyncConnections, "_opened", connected)
            else:
                monkeypatch.setattr(line, "data_received", received)
            with pytest.raises(asyncio.CancelledError):
                await task
            if moment == "connect":
                break  # the next one is not connected
        monkeypatch.undo()
        await transport.send(HttpMessage("GET", "/v2"), 10)
        await transport.close()

    peer = Peer(answer_ten)
    asyncio.run(main(peer.address))
    assert peer.accepted == 1
    peer.__exit__()
