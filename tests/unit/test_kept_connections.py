"""Connections that are kept for short questions: no answer takes for ever, and whose fault it is that there is none."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPSConnection

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.http import kept_connections
from shm_backend_utils.http.answers import fetch_json
from shm_backend_utils.http.kept_connections import KeptConnections
from shm_backend_utils.memory import registrations
from shm_backend_utils.memory.registrations import StatusEndpoint
from tests.unit.wire.peers import Listener

LONG_S = 30.0
"""Longer than anything here takes unless it hangs."""

EMPTY = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"

Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def listener(answer: Answer) -> Iterator[str]:
    """Have a connection's first question answered, and it kept until the test ends; yield the address."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        if connection.recv(4096):
            answer(connection)
            over.wait(LONG_S)

    with Listener(serve) as listening:
        try:
            yield listening.url.replace("grpc", "http")
        finally:
            over.set()


def address_of(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def dripping(begin: bytes, drop: bytes) -> Answer:
    """Return an answer that takes for ever, though no single wait is long."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(drop)
            time.sleep(0.03)

    return drip


def flood(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(1 << 16))


ENDLESS: dict[str, Answer] = {
    "never": lambda connection: None,
    "status": dripping(b"", b"H"),
    "head": dripping(OK, b"x"),
    "header": dripping(OK + b"X: ", b"x"),
    "body": dripping(OK + b"Content-Length: 1000\r\n\r\n", b" "),
    "chunks": dripping(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "no length": dripping(OK + b"\r\n", b" "),
    "flood": flood,
}


@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("ask", [StatusEndpoint.all, lambda asked: asked.find(["mine"])], ids=["list", "name"])
def test_an_answer_without_an_end_is_not_waited_for_to_its_end(
    ask: Callable[[StatusEndpoint], object], answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.2)
    with listener(answer) as url, contextlib.closing(StatusEndpoint(url)) as asked, pytest.raises(MachineError):
        ask(asked)


@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
def test_a_whole_answer_comes_in_time_or_is_none(answer: Answer) -> None:
    with listener(answer) as url, pytest.raises((OSError, HTTPException, ValueError)):
        fetch_json(f"{url}/v2", 0.2)


def answered(answer: bytes) -> list[tuple[int, bytes]]:
    with (
        listener(lambda connection: connection.sendall(answer)) as url,
        contextlib.closing(KeptConnections(url, LONG_S)) as connections,
    ):
        return connections.get(["/question"])


def test_a_kept_connection_that_is_ended_instead_of_an_answer_is_closed_and_another_one_asked() -> None:
    rest: list[bytes] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        contextlib.closing(KeptConnections(address_of(listening), LONG_S)) as connections,
    ):

        def serve() -> None:
            old, _ = listening.accept()
            with old:
                old.recv(4096)
                old.sendall(EMPTY)
                old.recv(4096)
                old.shutdown(socket.SHUT_WR)
                new, _ = listening.accept()
                with new:
                    new.recv(4096)
                    new.sendall(EMPTY)
                    rest.append(old.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        assert [connections.get(["/question"]) for _ in range(2)] == [[(204, b"")]] * 2
        thread.join()
    assert rest == [b""]


def test_an_answer_may_take_as_many_bytes_as_are_allowed_and_then_end(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    monkeypatch.setattr(kept_connections, "_MOST", len(head % 10) + 4)  # what is received at once, too
    assert answered(head % 10 + b"0123456789") == [(200, b"0123456789")]
    with pytest.raises(HTTPException, match="too long"):
        answered(head % 1000 + bytes(1000))


def test_a_forked_child_asks_over_connections_of_its_own() -> None:
    """Over its parent's it would read what is answered to that, and that what is answered to it."""
    asked: list[int] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(EMPTY)
        while connection.recv(4096):
            asked.append(connection.fileno())
            connection.sendall(EMPTY)

    with listener(answer) as url, contextlib.closing(KeptConnections(url, LONG_S)) as connections:
        connections.get(["/question"])
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError):
                connections.get(["/child"])
            os._exit(0)
        os.waitpid(child, 0)
        assert asked == []
        assert connections.get(["/question"]) == [(204, b"")]


def test_a_forked_child_keeps_no_connection_of_its_parents_from_ending() -> None:
    ended: list[bytes] = []
    may_exit, exits = os.pipe()

    def answer(connection: socket.socket) -> None:
        connection.sendall(EMPTY)
        connection.settimeout(LONG_S)
        ended.append(connection.recv(4096))

    with listener(answer) as url:
        connections = KeptConnections(url, LONG_S)
        connections.get(["/question"])
        child = os.fork()
        if not child:
            os.close(exits)
            os.read(may_exit, 1)
            os._exit(0)
        connections.close()
        time.sleep(0.2)
        found = list(ended)
        os.close(exits)
        os.waitpid(child, 0)
        os.close(may_exit)
    assert found == [b""]


# TLS


def without_certificates(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH:@SECLEVEL=0")
    return context


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n"], ids=["nothing", "the beginning of an answer"])
def test_the_wait_for_an_answer_over_tls_has_an_end(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.3)
    client = functools.partial(HTTPSConnection, context=without_certificates(ssl.PROTOCOL_TLS_CLIENT))
    monkeypatch.setitem(kept_connections._SCHEMES, "https", client)
    server = without_certificates(ssl.PROTOCOL_TLS_SERVER)
    asked: list[bytes] = []
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            plain, _ = listening.accept()
            with contextlib.suppress(OSError), server.wrap_socket(plain, server_side=True) as connection:
                asked.append(connection.recv(4096))
                connection.sendall(said)
                stop.wait(30)

        server_thread = threading.Thread(target=serve)
        server_thread.start()
        asking = StatusEndpoint(f"https://127.0.0.1:{listening.getsockname()[1]}")
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                asking.find(["mine"])
            except MachineError as error:
                errors.append(error)

        asking_thread = threading.Thread(target=ask, daemon=True)
        asking_thread.start()
        asking_thread.join(3)
        stop.set()
        server_thread.join()
        assert asked[0].startswith(b"GET /v2/systemsharedmemory/region/mine/status ")
        assert [type(error) for error in errors] == [MachineError]
