"""An HTTP answer that must have come by a moment."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.http.reply_in_time import ReplyInTime

LONG_S = 30.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end of a connection, and the server's."""
    client, server = socket.socketpair()
    with client, server:
        yield client, server


def test_an_answer_that_was_read_lets_go_of_its_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    server.sendall(ANSWER)
    reply = ReplyInTime(client, time.monotonic() + LONG_S)
    reader = reply.fp
    reply.begin()
    assert (reply.status, reply.read()) == (200, b"ok")
    assert reader.closed
    client.close()
    assert client.fileno() == -1  # while somebody reads from it, it stays open


def test_an_answer_that_comes_too_late_is_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    server.sendall(ANSWER)
    with pytest.raises(TimeoutError):
        ReplyInTime(client, time.monotonic() - 1).begin()
