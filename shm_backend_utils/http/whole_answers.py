"""A server's whole answer to one question, over a connection of its own."""

from __future__ import annotations

import contextlib
import time
from http import HTTPStatus
from http.client import HTTPException, IncompleteRead
from typing import Final
from urllib.error import HTTPError
from urllib.parse import urlsplit

from .kept_connections import connect
from .reply_in_time import ReplyInTime

__all__ = ["fetch"]

_MOST_BYTES: Final = 1 << 25


def fetch(url: str, timeout_s: float, most_bytes: int = _MOST_BYTES) -> bytes:
    """Ask by GET, by no proxy, and return the answer's body.

    Connecting and the whole answer may each take ``timeout_s``; a body of more than ``most_bytes`` is not read to its
    end. HTTPError if the server refuses; another OSError, HTTPException or ValueError if no answer comes in time, or
    not by HTTP, or too large, or it is no URL.
    """
    with contextlib.closing(connect(url, timeout_s)) as connection:
        deadline = time.monotonic() + timeout_s
        connection.request("GET", urlsplit(url).path, headers={"Connection": "close"})
        reply = ReplyInTime(connection.sock, deadline)
        reply.begin()
        if reply.status != HTTPStatus.OK:
            raise HTTPError(url, reply.status, reply.reason, reply.headers, reply)
        body = reply.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise HTTPException(f"an answer of more than {most_bytes} bytes")
        if reply.length:  # a limited read takes what there is for all
            raise IncompleteRead(body, reply.length)
        return body
