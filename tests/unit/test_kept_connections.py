"""How a model asks the server what a name stands for: over connections that are kept; no answer takes for ever."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.client import HTTPException, HTTPSConnection
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.http import questions
from shm_backend_utils.http.questions import KeptConnections, fetch_json
from shm_backend_utils.memory import registrations
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint
from tests.unit.wire.peers import Listener

LONG_S = 30.0

EMPTY = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"

Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def listener(answer: Answer) -> Iterator[str]:
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


def dripping(begin: bytes, drop: bytes) -> Answer:

    def drip(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(drop)
            time.sleep(0.03)

    return drip


def flood(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(1 << 16))


ENDLESS: list[Answer] = [
    lambda connection: None,
    dripping(b"", b"H"),
    dripping(OK, b"x"),
    dripping(OK + b"X: ", b"x"),
    dripping(OK + b"Content-Length: 1000\r\n\r\n", b" "),
    dripping(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    dripping(OK + b"\r\n", b" "),
    flood,
]


@pytest.mark.parametrize("answer", ENDLESS, ids=range(8))
def test_an_answer_without_an_end_is_not_waited_for_to_its_end(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.2)
    with listener(answer) as url, contextlib.closing(StatusEndpoint(url)) as asked:
        with pytest.raises(MachineError):
            asked.all()
        with pytest.raises(MachineError):
            asked.find(["mine"])
        with pytest.raises((OSError, HTTPException, ValueError)):
            fetch_json(f"{url}/v2", 0.2)


def test_a_kept_connection_that_is_ended_instead_of_an_answer_is_closed_and_another_one_asked() -> None:
    rest: list[bytes] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        contextlib.closing(KeptConnections(f"http://127.0.0.1:{listening.getsockname()[1]}", LONG_S)) as connections,
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
    def answered(length: int) -> list[tuple[int, bytes]]:
        answer = listener(lambda connection: connection.sendall(head % length + bytes(length)))
        with answer as url, contextlib.closing(KeptConnections(url, LONG_S)) as connections:
            return connections.get(["/question"])

    head = OK + b"Content-Length: %d\r\n\r\n"
    monkeypatch.setattr(questions, "_MOST", len(head % 10) + 4)  # what is received at once, too
    assert answered(10) == [(200, bytes(10))]
    with pytest.raises(HTTPException, match="too long"):
        answered(1000)


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


def without_certificates(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH:@SECLEVEL=0")
    return context


@pytest.mark.parametrize("said", [b"", OK])
def test_the_wait_for_an_answer_over_tls_has_an_end(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.3)
    client = functools.partial(HTTPSConnection, context=without_certificates(ssl.PROTOCOL_TLS_CLIENT))
    monkeypatch.setitem(questions._SCHEMES, "https", client)
    server = without_certificates(ssl.PROTOCOL_TLS_SERVER)
    asked: list[bytes] = []
    stop = threading.Event()

    def serve(plain: socket.socket) -> None:
        with contextlib.suppress(OSError), server.wrap_socket(plain, server_side=True) as connection:
            asked.append(connection.recv(4096))
            connection.sendall(said)
            stop.wait(LONG_S)

    with (
        Listener(serve) as listening,
        contextlib.closing(StatusEndpoint(listening.url.replace("grpc", "https"))) as asking,
    ):
        begin = time.monotonic()
        with pytest.raises(MachineError):
            asking.find(["mine"])
        stop.set()
    assert time.monotonic() - begin < LONG_S / 2
    assert asked[0].startswith(b"GET /v2/systemsharedmemory/region/mine/status ")


ONE = "/v2/systemsharedmemory/region/mine/status"
LIST = "/v2/systemsharedmemory/status"
MINE = Registration("/one", 0, 16)


class Server(Listener):
    """Answers as Triton does, over connections that stay open, and notes what it was asked over which."""

    def __init__(self) -> None:
        self.registered = {"mine": MINE}
        self.asked: list[str] = []
        self.clients: list[Any] = []
        self.spoil: Callable[[bytes], bytes] = lambda answer: answer
        """Changes the whole answer to a question for one name."""
        self.closes = False
        super().__init__(self._serve)
        self.url = self.url.replace("grpc", "http")

    def answer(self, path: str) -> bytes:
        told = [{"name": name, **asdict(found)} for name, found in self.registered.items()]
        if path != LIST:
            told = [each for each in told if path == f"/v2/systemsharedmemory/region/{each['name']}/status"]
        status, body = b"200 OK", json.dumps(told).encode()
        if path != LIST and not told:
            status, body = b"404 Not Found", b'{"error":"Unable to find system shared memory region"}'
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        return head + body if path == LIST else self.spoil(head + body)

    def _serve(self, connection: socket.socket) -> None:
        while request := connection.recv(4096):
            self.asked.append(request.split()[1].decode())
            self.clients.append(connection.getpeername())
            connection.sendall(self.answer(request.split()[1].decode()))
            if self.closes:
                return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def endpoint(server: Server) -> Iterator[StatusEndpoint]:
    with contextlib.closing(StatusEndpoint(server.url)) as endpoint:
        yield endpoint


def find(endpoint: StatusEndpoint, name: str) -> Registration | None:
    return endpoint.find([name]).get(name)


def test_a_name_is_asked_for_each_time_over_one_connection(server: Server, endpoint: StatusEndpoint) -> None:
    server.spoil = lambda answer: answer.replace(b"Content-Length", b"content-LENGTH")
    assert [find(endpoint, "mine") for _ in range(5)] == [MINE] * 5
    assert server.asked == [ONE] * 5
    assert len(set(server.clients)) == 1
    endpoint.close()
    assert find(endpoint, "mine") == MINE
    assert len(set(server.clients)) == 2


def test_names_are_asked_for_at_once_each_over_a_connection(server: Server, endpoint: StatusEndpoint) -> None:
    names = ["mine", "yours", "hers", "theirs"]
    server.registered = {name: Registration(f"/{name}", 0, 16) for name in names}
    ready = threading.Barrier(len(names), timeout=5)

    def wait_for_the_others(answer: bytes) -> bytes:
        ready.wait()
        return answer

    server.spoil = wait_for_the_others
    for _ in range(3):
        assert endpoint.find(names) == server.registered
    assert len(set(server.clients)) == len(names)
    assert LIST not in server.asked


def test_many_names_and_escaped_ones_are_looked_for_in_the_list(server: Server, endpoint: StatusEndpoint) -> None:
    server.registered = {str(number): Registration(f"/{number}", 0, 16) for number in range(9)}
    expected = {str(number): server.registered[str(number)] for number in range(5)}
    assert endpoint.find([*expected, "nobody"]) == expected
    assert server.asked == [LIST]
    assert endpoint.find(["nobody", "3"]) == {"3": expected["3"]}
    for name in ("a b", "a/b", "a%62", "b?c", "b#c", "ä", "", "a\r\nX: y"):
        server.asked.clear()
        server.registered[name] = MINE
        assert find(endpoint, name) == MINE
        assert server.asked == [LIST]


def test_a_connection_that_the_server_has_closed_is_replaced(server: Server, endpoint: StatusEndpoint) -> None:
    server.closes = True
    assert [find(endpoint, "mine") for _ in range(3)] == [MINE] * 3
    assert len(set(server.clients)) == 3
    assert server.asked == [ONE] * 3


def test_an_answer_is_no_other_ones(server: Server, endpoint: StatusEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    old, two = server.answer(ONE), Registration("/two", 4, 12)
    server.spoil = lambda answer: answer + old
    find(endpoint, "mine")
    server.spoil = lambda answer: answer
    server.registered["mine"] = two
    time.sleep(0.05)
    assert find(endpoint, "mine") == two
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.2)
    with contextlib.closing(StatusEndpoint(server.url)) as impatient:
        server.spoil = lambda answer: time.sleep(0.4) or answer  # type: ignore[func-returns-value]
        with pytest.raises(MachineError, match="does not answer"):
            find(impatient, "mine")
        server.spoil = lambda answer: answer
        server.registered["mine"] = MINE
        assert find(impatient, "mine") == MINE


SPOILT: list[Callable[[bytes], bytes]] = [
    lambda answer: answer.replace(b"Content-Length", b"Content-Other"),
    lambda answer: answer.replace(b'"mine"', b'"nine"'),
    lambda answer: answer.replace(b"[", b" ").replace(b"]", b" "),
    lambda answer: answer.replace(b"{", b"}"),
    lambda answer: b"SSH-2.0-OpenSSH_9.2\r\ncontent-length: 0\r\n\r\n",
    lambda answer: answer.replace(b"200 OK", b"403 Forbidden"),
    lambda answer: EMPTY,
    lambda answer: answer.replace(b'"key"', b'"yek"'),
]


def test_odd_answers_lead_to_a_list(server: Server) -> None:
    for server.spoil in SPOILT:
        server.asked.clear()
        with contextlib.closing(StatusEndpoint(server.url)) as endpoint:
            assert find(endpoint, "mine") == MINE
        assert server.asked == [ONE, LIST]
