"""Short questions to one HTTP server, over connections that are kept: what a question costs is its round trip.

Only what such a server answers to short questions is understood: a status, a length and a body. ``http.client``
understands all of HTTP, and takes twice as long.
"""

from __future__ import annotations

import re
import select
import socket
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

__all__ = ["KeptConnections"]

_MOST: Final = 1 << 16  # bytes of an answer
_END_OF_HEAD: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_SCHEMES: Final = {"http": HTTPConnection, "https": HTTPSConnection}


class KeptConnections:
    """Connections to one server, by no proxy. Any number of threads may ask, each over a connection of its own.

    Parameters
    ----------
    url : str
        The server's. What it says wrong is told by the first question.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[socket.socket] = []  # a list's append and pop are atomic

    def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Ask once; over a connection that the server has closed meanwhile, once more over another.

        Parameters
        ----------
        path : str
            Behind the server's URL.
        timeout_s : float
            For all of it.

        Returns
        -------
        tuple of int and bytes
            The answer's status and body.

        Raises
        ------
        TimeoutError
            There was no whole answer in time.
        OSError, http.client.HTTPException, ValueError
            The server cannot be reached, or does not answer in that way.
        """
        deadline = time.monotonic() + timeout_s
        place = urlsplit(self._url)
        question = f"GET {place.path}{path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
        while True:
            connection = self._take()
            is_kept = connection is not None
            if connection is None:
                connection = self._open(timeout_s)
            try:
                answer = _ask(connection, question, deadline)
            except BaseException as error:  # the late answer must not be taken for the next one's
                connection.close()
                if is_kept and isinstance(error, ConnectionError):
                    continue
                raise
            self._idle.append(connection)
            return answer

    def close(self) -> None:
        """Close the connections that nobody uses now. Others may be opened afterwards."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> socket.socket | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if _is_silent(connection):
                return connection
            connection.close()

    def _open(self, timeout_s: float) -> socket.socket:
        place = urlsplit(self._url)
        kind = _SCHEMES.get(place.scheme)
        if kind is None or not place.hostname:
            raise ValueError(f"{self._url!r} is no URL of an HTTP server")
        connection = kind(place.hostname, place.port, timeout=timeout_s)
        connection.connect()
        opened: socket.socket = connection.sock
        return opened


def _is_silent(connection: socket.socket) -> bool:
    """Return whether the server has neither closed a connection nor spoken unasked."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def _ask(connection: socket.socket, question: bytes, deadline: float) -> tuple[int, bytes]:
    connection.sendall(question)
    data = b""
    length = _MOST
    while len(data) < length:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(_MOST)
        if not piece:
            raise ConnectionResetError
        data += piece
        end = data.find(_END_OF_HEAD)
        if end >= 0:
            said = _LENGTH.search(data, 0, end + 2)
            if said is None:
                raise HTTPException("an answer without a length")
            length = end + len(_END_OF_HEAD) + int(said[1])
    status = _STATUS.match(data)
    if status is None or len(data) != length:
        raise HTTPException("an answer that is none")
    return int(status[1]), data[end + len(_END_OF_HEAD) :]
