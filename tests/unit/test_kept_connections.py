"""Connections that are kept for short questions: whose fault it is that there is no answer, and what is none."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException

import pytest

from shm_backend_utils.http import kept_connections as module
from shm_backend_utils.http.kept_connections import KeptConnections

LONG_S = 30.0
"""Longer than anything here takes unless it hangs."""

EMPTY = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"

Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def listener(answer: Answer) -> Iterator[str]:
    """Have one question answered, and the connection kept until the test ends; yield the address."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                if connection.recv(4096):
                    answer(connection)
                    over.wait(LONG_S)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield address_of(listening)
        finally:
            over.set()
            thread.join()


def address_of(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def answered(answer: Answer, timeout_s: float = LONG_S) -> list[tuple[int, bytes]]:
    with listener(answer) as url, contextlib.closing(KeptConnections(url, timeout_s)) as connections:
        return connections.get(["/question"])


def saying(data: bytes) -> Answer:
    return lambda connection: connection.sendall(data)


@pytest.mark.parametrize("url", ["http://", "http:///v2", "ftp://127.0.0.1", "127.0.0.1:8000", "http:"])
def test_what_is_no_url_of_an_http_server_is_not_connected_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> socket.socket:
        raise AssertionError("it was connected to")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ValueError, match=f"'{url}' is no URL of an HTTP server"):
        KeptConnections(url, LONG_S).get(["/question"])


def test_an_answer_without_a_body_is_one() -> None:
    assert answered(saying(EMPTY)) == [(204, b"")]


@pytest.mark.parametrize(
    "answer",
    [b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0\r\nContent-Length: 0\r\n\r\n"],
    ids=["no head", "no length", "no status"],
)
def test_an_answer_that_lacks_what_answers_have_is_not_understood(answer: bytes) -> None:
    with pytest.raises(HTTPException, match="not understood"):
        answered(saying(answer))


def test_more_than_an_answer_is_none() -> None:
    with pytest.raises(HTTPException, match="more than an answer"):
        answered(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n12"))


def test_a_question_that_a_new_connection_does_not_take_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def sendall(*_: object) -> None:
        raise BrokenPipeError

    with socket.create_server(("127.0.0.1", 0)) as listening, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendall", sendall)
        with pytest.raises(BrokenPipeError):
            KeptConnections(address_of(listening), LONG_S).get(["/question"])


def test_a_new_connection_that_is_closed_without_an_answer_is_an_error() -> None:
    with pytest.raises(ConnectionResetError):
        answered(lambda connection: connection.shutdown(socket.SHUT_RDWR))


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


def test_connections_that_nobody_uses_can_be_closed() -> None:
    rest: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(EMPTY)
        rest.append(connection.recv(4096))

    with listener(answer) as url:
        connections = KeptConnections(url, LONG_S)
        connections.get(["/question"])
        connections.close()
    assert rest == [b""]


def test_an_answer_may_take_as_many_bytes_as_are_allowed_and_then_end(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
    monkeypatch.setattr(module, "_MOST", len(head) + 4)  # what is received at once, too
    assert answered(saying(head + b"0123456789")) == [(200, b"0123456789")]


def test_an_answer_that_is_longer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    monkeypatch.setattr(module, "_MOST", len(head) + 4)
    with pytest.raises(HTTPException, match="too long"):
        answered(saying(head + bytes(1000)))


def test_a_head_without_an_end_is_waited_for_until_the_time_is_up() -> None:
    def drip(connection: socket.socket) -> None:
        for _ in range(100):
            connection.sendall(b"H")
            time.sleep(0.02)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        answered(drip, timeout_s=0.2)
    assert time.monotonic() - begin < LONG_S


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
            connections._timeout_s = 0.2  # the listener takes one connection
            with contextlib.suppress(TimeoutError):
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
