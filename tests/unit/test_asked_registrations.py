"""How a model asks the server what a name stands for: at once, over connections that are kept, and never for long."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory import registrations
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint

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
def test_a_name_that_a_url_spells_otherwise_is_looked_for_in_the_list(
    server: Server, endpoint: StatusEndpoint, name: str
) -> None:
    server.registered[name] = MINE
    assert find(endpoint, name) == MINE
    assert server.asked == [LIST]


def test_a_connection_that_the_server_has_closed_is_replaced(server: Server, endpoint: StatusEndpoint) -> None:
    server.closes = True
    assert [find(endpoint, "mine") for _ in range(3)] == [MINE] * 3
    assert len(set(server.clients)) == 3
    assert server.asked == [ONE] * 3


def test_a_connection_on_which_the_server_has_spoken_unasked_is_not_used(
    server: Server, endpoint: StatusEndpoint
) -> None:
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
def test_what_is_not_understood_is_looked_up_in_the_list(
    server: Server, endpoint: StatusEndpoint, spoil: Callable[[bytes], bytes]
) -> None:
    server.spoil = spoil
    assert find(endpoint, "mine") == MINE
    assert server.asked == [ONE, LIST]
