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
from http.client import HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.http import questions
from shm_backend_utils.http.questions import KeptConnections, fetch_json
from shm_backend_utils.memory import registrations
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint
from tests.unit.wire.peers import Listener

LONG_S = 30.0
"""Longer than anything here takes unless it hangs."""

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
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    monkeypatch.setattr(questions, "_MOST", len(head % 10) + 4)  # what is received at once, too
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


class Server:
    """Answers as Triton does, over connections that stay open, and notes what it was asked over which."""

    def __init__(self) -> None:
        self.registered = {"mine": MINE}
        self.asked: list[str] = []
        self.clients: list[Any] = []
        self.spoil: Callable[[bytes], bytes] = lambda answer: answer
        """Changes the whole answer to a question for one name."""
        self.closes = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.clients.append(self.client_address)
                self.wfile.write(server.answer(self.path))
                self.close_connection = server.closes or self.close_connection

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path: str) -> bytes:
        names = list(self.registered)
        if path != LIST:
            names = [name for name in names if path == f"/v2/systemsharedmemory/region/{name}/status"]
        said = [{"name": name, **self._entry(name)} for name in names]
        body = json.dumps(said).encode()
        status = b"200 OK"
        if path != LIST and not names:
            status, body = b"404 Not Found", b'{"error":"Unable to find system shared memory region"}'
        whole = (
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
        )
        return whole if path == LIST else self.spoil(whole)

    def _entry(self, name: str) -> dict[str, object]:
        found = self.registered[name]
        return {"key": found.key, "offset": found.offset, "byte_size": found.byte_size}

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as server:
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


def test_many_names_are_looked_for_in_the_list(server: Server, endpoint: StatusEndpoint) -> None:
    server.registered = {str(number): Registration(f"/{number}", 0, 16) for number in range(9)}
    expected = {str(number): server.registered[str(number)] for number in range(5)}
    assert endpoint.find([*expected, "nobody"]) == expected
    assert server.asked == [LIST]
    assert endpoint.find(["nobody", "3"]) == {"3": expected["3"]}


@pytest.mark.parametrize("name", ["a b", "a/b", "a%62", "b?c", "b#c", "ä", "", "a\r\nX: y"], ids=ascii)
def test_an_escaped_name_is_looked_for_in_the_list(server: Server, endpoint: StatusEndpoint, name: str) -> None:
    server.registered[name] = MINE
    assert find(endpoint, name) == MINE
    assert server.asked == [LIST]


def test_a_connection_that_the_server_has_closed_is_replaced(server: Server, endpoint: StatusEndpoint) -> None:
    server.closes = True
    assert [find(endpoint, "mine") for _ in range(3)] == [MINE] * 3
    assert len(set(server.clients)) == 3
    assert server.asked == [ONE] * 3


def test_a_connection_with_unasked_words_is_not_used(server: Server, endpoint: StatusEndpoint) -> None:
    old = server.answer(ONE)
    server.spoil = lambda answer: answer + old  # a second answer, which would be taken for the next question's
    find(endpoint, "mine")
    server.spoil = lambda answer: answer
    server.registered["mine"] = Registration("/two", 4, 12)
    time.sleep(0.05)
    assert find(endpoint, "mine") == Registration("/two", 4, 12)


def test_a_late_answer_is_not_taken_for_the_next_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.2)
    endpoint = StatusEndpoint(server.url)

    def late(answer: bytes) -> bytes:
        time.sleep(0.4)
        return answer

    server.spoil = late
    with pytest.raises(MachineError, match="does not answer"):
        find(endpoint, "mine")
    server.spoil = lambda answer: answer
    server.registered["mine"] = Registration("/two", 4, 12)
    assert find(endpoint, "mine") == Registration("/two", 4, 12)
    endpoint.close()


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "no length": lambda answer: answer.replace(b"Content-Length", b"Content-Other"),
    "another name": lambda answer: answer.replace(b'"mine"', b'"nine"'),
    "no list": lambda answer: answer.replace(b"[", b" ").replace(b"]", b" "),
    "no JSON": lambda answer: answer.replace(b"{", b"}"),
    "no HTTP": lambda answer: b"SSH-2.0-OpenSSH_9.2\r\ncontent-length: 0\r\n\r\n",
    "a refusal": lambda answer: answer.replace(b"200 OK", b"403 Forbidden"),
    "nothing": lambda answer: b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    "no key": lambda answer: answer.replace(b'"key"', b'"yek"'),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_odd_answers_lead_to_a_list(server: Server, endpoint: StatusEndpoint, spoil: Callable[[bytes], bytes]) -> None:
    server.spoil = spoil
    assert find(endpoint, "mine") == MINE
    assert server.asked == [ONE, LIST]
