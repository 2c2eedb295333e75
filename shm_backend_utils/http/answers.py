"""A server's whole answer to one question, over a connection of its own, in a bounded time."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import time
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit

from .kept_connections import connect

__all__ = ["fetch_json"]

_MOST_BYTES: Final = 1 << 25


def fetch_json(url: str, timeout_s: float) -> Any:
    """Ask by GET, by no proxy, and return the answer in JSON's types; connecting and answering each take ``timeout_s``.

    HTTPError if the server refuses; else OSError, HTTPException or ValueError if no JSON comes in time, or too much.
    """
    with contextlib.closing(connect(url, timeout_s)) as connection:
        deadline = time.monotonic() + timeout_s
        connection.request("GET", urlsplit(url).path, headers={"Connection": "close"})
        reply = _ReplyInTime(connection.sock, deadline)
        reply.begin()
        if reply.status != HTTPStatus.OK:
            raise HTTPError(url, reply.status, reply.reason, reply.headers, reply)
        body = reply.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise HTTPException(f"an answer of more than {_MOST_BYTES} bytes")
        if reply.length:  # a limited read takes what there is for all
            raise IncompleteRead(body, reply.length)
        return json.loads(body)


class _ReplyInTime(HTTPResponse):
    """An answer whose every piece comes by a moment of ``monotonic()``: a socket's timeout begins anew with each."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock)
        self.fp = io.BufferedReader(_ReaderInTime(sock, self.fp.detach(), deadline))


class _ReaderInTime(io.RawIOBase):
    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        self._socket = sock
        self._raw = raw
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
