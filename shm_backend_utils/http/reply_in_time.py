"""An HTTP answer that has an end: a socket's timeout is for each piece of it, anew."""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse
from typing import Any

__all__ = ["ReplyInTime"]


class ReplyInTime(HTTPResponse):
    """An answer that comes whole, head included, by a moment of ``monotonic()``; else reading it is a TimeoutError."""

    def __init__(self, sock: socket.socket, deadline: float, **named: Any) -> None:
        super().__init__(sock, **named)
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
