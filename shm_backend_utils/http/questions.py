"""GET requests to an HTTP server, without a proxy: whole answers in bounded time, or short ones over kept connections.

A short question costs one round trip. Its connection parses only a status, a length and a body, which takes half the
time of ``http.client``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import select
import socket
import struct
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit

from ..process import call_after_fork

__all__ = ["KeptConnections", "fetch_json"]

_MOST_WHOLE: Final = 1 << 25  # bytes of a whole answer
_MOST: Final = 1 << 16  # bytes of a short answer
_END_OF_HEAD: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_SCHEMES: Final = {"http": HTTPConnection, "https": HTTPSConnection}


def fetch_json(url: str, timeout_s: float) -> Any:
    """Send a GET request, and return the parsed JSON; connecting and answering may each take ``timeout_s``.

    HTTPError if the status is not 200; OSError, HTTPException or ValueError if the answer is late, long or not JSON.
    """
    with contextlib.closing(connect(url, timeout_s)) as connection:
        deadline = time.monotonic() + timeout_s
        connection.request("GET", urlsplit(url).path, headers={"Connection": "close"})
        reply = HTTPResponse(connection.sock)
        reply.fp = io.BufferedReader(_InTime(connection.sock, deadline))
        reply.begin()
        if reply.status != HTTPStatus.OK:
            raise HTTPError(url, reply.status, reply.reason, reply.headers, reply)
        body = reply.read(_MOST_WHOLE + 1)
        if len(body) > _MOST_WHOLE:
            raise HTTPException(f"an answer of more than {_MOST_WHOLE} bytes")
        if reply.length:  # a read with a limit does not notice a short body
            raise IncompleteRead(body, reply.length)
        return json.loads(body)


class _InTime(socket.SocketIO):
    """A socket's bytes until a deadline of ``monotonic()``: its timeout alone would start anew with each read."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock, "r")
        self._own = sock
        self._deadline = deadline

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._own.settimeout(left_s)
        return super().readinto(buffer)


class KeptConnections:
    """Connections to one server. Thread-safe. To connect and to get all answers may each take ``timeout_s``."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []  # a list's append and pop are atomic
        call_after_fork(self)

    def after_fork(self) -> None:
        """Forget the parent's connections in a forked child: both would read each other's answers."""
        self._idle = []

    def get(self, paths: Sequence[str]) -> list[tuple[int, bytes]]:
        """Ask several questions at once, each again if the server closed its connection; return statuses and bodies.

        TimeoutError if an answer is not complete in time; OSError, HTTPException or ValueError for other failures.
        """
        deadline = time.monotonic() + self._timeout_s
        asked: list[_Connection] = []
        answers = []
        try:
            for path in paths:
                asked.append(self._take() or _Connection(self._url, self._timeout_s))
                asked[-1].ask(path)
            for number, path in enumerate(paths):
                try:
                    answer = asked[number].answer(deadline)
                except ConnectionError:
                    asked[number].close()
                    asked[number] = _Connection(self._url, self._timeout_s)
                    asked[number].ask(path)
                    answer = asked[number].answer(deadline)
                answers.append(answer)
        except BaseException:  # a late answer must not be taken for the next question's
            for connection in asked:
                connection.close()
            raise
        self._idle += asked
        return answers

    def close(self) -> None:
        """Close the idle connections. Others may be opened afterwards."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_silent():
                return connection
            connection.close()


class _Connection:
    """One connection, for one question after another."""

    def __init__(self, url: str, timeout_s: float) -> None:
        place = urlsplit(url)
        self._socket: socket.socket = connect(url, timeout_s).sock
        if place.scheme == "http":  # the kernel enforces the timeout, without another system call per wait
            self._socket.settimeout(None)
            timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._begin = f"GET {place.path}"
        self._end = f" HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n"
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        call_after_fork(self)

    def is_silent(self) -> bool:
        """Return whether the server has neither closed the connection nor sent unexpected data."""
        return not self._poll.poll(0)

    def ask(self, path: str) -> None:
        """Send a question, which fits the socket's buffer; :meth:`answer` notices a closed connection."""
        try:
            self._socket.sendall(f"{self._begin}{path}{self._end}".encode())
        except ConnectionError:
            return

    def answer(self, deadline: float) -> tuple[int, bytes]:
        """Wait for the answer; raises like :meth:`KeptConnections.get`, or ConnectionError if the server closed."""
        data = self._receive_until(deadline, 0)
        while (end := data.find(_END_OF_HEAD)) < 0:
            data += self._receive_until(deadline, len(data))
        length_header = _LENGTH.search(data, 0, end + 2)
        status = _STATUS.match(data)
        if length_header is None or status is None:
            raise HTTPException("an answer that is not understood")
        begin = end + len(_END_OF_HEAD)
        length = begin + int(length_header[1])
        while len(data) < length:
            data += self._receive_until(deadline, len(data))
        if len(data) != length:
            raise HTTPException("more than an answer")
        return int(status[1]), data[begin:]

    def close(self) -> None:
        self._socket.close()

    after_fork = close  # a forked child's copy would keep the parent's connection open

    def _receive_until(self, deadline: float, received: int) -> bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if received > _MOST:
            raise HTTPException("an answer that is too long")
        try:
            piece = self._socket.recv(_MOST)
        except BlockingIOError:
            raise TimeoutError from None
        if not piece:
            raise ConnectionResetError
        return piece


def connect(url: str, timeout_s: float) -> HTTPConnection:
    """Connect to the server of a URL, without a proxy; OSError, HTTPException or ValueError if that fails."""
    place = urlsplit(url)
    kind = _SCHEMES.get(place.scheme)
    if kind is None or not place.hostname:
        raise ValueError(f"{url!r} is not a URL of an HTTP server")
    connection: HTTPConnection = kind(place.hostname, place.port, timeout=timeout_s)
    connection.connect()
    return connection
