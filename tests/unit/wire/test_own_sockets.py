"""The client's own sockets: pings, signals, a client that nobody closes, and what carries its calls."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.client.transports.connections import Exchange
from shm_backend_utils.client.transports.grpc import streams
from shm_backend_utils.client.transports.grpc.http2 import Request
from shm_backend_utils.client.transports.grpc.transport import head_of
from shm_backend_utils.client.transports.transport import connect
from tests.unit.wire.peers import END_HEADERS, SETTINGS, Listener, answering, frame, message, requests_of
from tests.unit.wire.test_hostile_peers import ANSWER, HEADS, PATIENCE_S, answer_to, ask, at_once, staying, stream_of


def test_pings_are_answered_while_the_user_of_a_stream_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PINGS_S", 0.05)
    heard = threading.Event()
    ping, pong = (frame(6, flags, 0, b"are you?") for flags in (0, 1))
    first = message(service_pb2.ModelStreamInferResponse().SerializeToString())

    def serve(connection: socket.socket) -> None:
        connection.sendall(SETTINGS)
        stream = requests_of(connection)()
        connection.sendall(frame(1, END_HEADERS, stream, HEADS[0]) + frame(0, 0, stream, first) + ping)
        received = b""
        while not received.endswith(pong):
            received += connection.recv(1 << 16)
        heard.set()
        connection.sendall(answer_to(stream)[len(frame(1, END_HEADERS, stream, HEADS[0])) :])

    with Listener(serve) as listener, contextlib.closing(cast(Any, connect(listener.url, None))) as transport:
        answers = stream_of(transport)
        next(answers)
        while not heard.wait(0.02):  # other streams are left meanwhile
            transport._streams._left.put(SimpleNamespace(end=bool))
        assert not list(answers)


def test_signals_without_end_do_not_move_the_deadline() -> None:
    with Listener(at_once(SETTINGS)) as listener:
        transport = connect(listener.url, None)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        begin = time.monotonic()
        try:
            with pytest.raises(DeadlineExceededError):
                ask(transport, 0.4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - begin < 2
        transport.close()


def test_a_client_that_nobody_closes_leaves_no_socket_and_close_may_find_none() -> None:
    class Taken(list[Any]):  # by another thread, meanwhile
        def pop(self, *_: Any) -> Any:
            self.clear()
            return super().pop()

    with Listener(staying(answer_to)) as listener:
        transport: Any = connect(listener.url, None)
        ask(transport)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        del transport
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) < before  # noqa: PTH208
        transport = connect(listener.url, None)
        ask(transport)
        transport._connections._idle = Taken(transport._connections._idle)
        transport.close()


def test_an_exchange_that_ends_late_leaves_the_connection_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(staying(answer_to)) as listener, contextlib.closing(connect(listener.url, None)) as transport:
        connections, request = cast(Any, transport)._connections, Request(head_of("ServerLive", "127.0.0.1"), b"")
        interrupted, other = Exchange(connections, request), Exchange(connections, request)
        deadline, give_back = time.monotonic() + PATIENCE_S, connections.give_back

        def interrupt(*given: Any) -> None:
            give_back(*given)
            raise KeyboardInterrupt

        interrupted.turn(deadline)
        while interrupted.read(deadline):
            pass
        monkeypatch.setattr(connections, "give_back", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.turn(deadline)
        other.turn(deadline)
        interrupted.end()
        assert cast(Any, other)._connection._socket.fileno() >= 0
        other.end()


def test_a_client_says_what_carries_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Listener(answering(lambda peer, stream, _: peer.send(stream, ANSWER))) as listener:
        with ShmClient(listener.url, timeout_s=PATIENCE_S) as client:
            assert repr(client).endswith(" wire=sockets open>")
        monkeypatch.delenv("no_proxy")
        transport = connect(listener.url, None)
        assert transport.codec.needs_grpcio == "the proxy in the environment variable grpc_proxy"
        transport.close()
