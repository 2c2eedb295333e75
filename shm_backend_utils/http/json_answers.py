"""What a server answers in JSON."""

from __future__ import annotations

import contextlib
import json
import time
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from .kept_connections import connect
from .reply_in_time import ReplyInTime

__all__ = ["fetch_json"]


def fetch_json(url: str, timeout_s: float) -> Any:
    """Ask by GET, over a connection of its own and by no proxy, and return the answer in JSON's types.

    Parameters
    ----------
    url : str
        What to ask for.
    timeout_s : float
        How long to wait for the whole answer, connecting aside, which may take as long again.

    Raises
    ------
    urllib.error.HTTPError
        The server refuses.
    OSError, http.client.HTTPException, ValueError
        Nobody answers there in time, or not in JSON.
    """
    with contextlib.closing(connect(url, timeout_s)) as connection:
        deadline = time.monotonic() + timeout_s
        connection.request("GET", urlsplit(url).path, headers={"Connection": "close"})
        reply = ReplyInTime(connection.sock, deadline)
        reply.begin()
        if reply.status != HTTPStatus.OK:
            raise HTTPError(url, reply.status, reply.reason, reply.headers, reply)
        return json.loads(reply.read())
