"""Connections over HTTP/1.1, whose answers ``httptools`` parses."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from ....errors import CallerError
from ...options import Tls, tls_context
from ..aio_connections import AsyncConnections
from ..connections import Connections
from ..conversation import Conversation, Server, Unanswered
from ..messages import Codec
from ..transport import AsyncTransport, Transport
from .codec import Answer, HttpCodec, HttpMessage

__all__ = ["AsyncHttpTransport", "Http1", "HttpTransport", "Request"]

_MOST_HEAD_BYTES: Final = 1 << 16
_FIRST_FINAL_STATUS: Final = 200


class Request(NamedTuple):
    parts: Sequence[bytes | memoryview]
    most_bytes: float  # of the answer's body


class Http1(Conversation):
    """One connection, as its client, without I/O. It takes one request after another."""

    is_shared = False

    def __init__(self) -> None:
        self.out = []
        self.ended: dict[int, Answer | Unanswered] = {}
        self.is_ready = True
        self.failure = ""
        self._number = 0
        self._is_under_way = False
        self._most_body: float = 0
        self._most: float = 0  # bytes of an answer, or of its headers until they are complete
        self._received = 0
        self._read: dict[bytes, bytes] = {}  # headers, or trailers
        self._headers: dict[bytes, bytes] | None = None  # once all have come
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(
            SimpleNamespace(
                on_message_begin=self._begin_answer,
                on_header=self._read.__setitem__,
                on_headers_complete=self._end_head,
                on_body=self._body.append,
                on_message_complete=self._end_answer,
            )
        )

    @property
    def has_room(self) -> bool:
        return not (self.failure or self._is_under_way)

    def begin(self, request: Request, timeout_s: float) -> int:
        parts, self._most_body = request
        self.out += parts
        self._is_under_way = True
        self._headers = None
        self._received = 0
        self._most = _MOST_HEAD_BYTES
        self._number += 1
        return self._number

    def receive(self, data: bytes) -> None:
        if not data:
            headers = self._headers
            if headers is not None and not {b"content-length", b"transfer-encoding"} & {*map(bytes.lower, headers)}:
                self._end_answer()
            self._fail("Socket closed" if headers is None else "IncompleteRead")
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(f"{'BadStatusLine' if self._headers is None else type(error).__name__}: {error}")
        if self._received > self._most:
            self._fail(f"an answer of more than {self._most} bytes")

    def cancel(self, number: int) -> None:
        if number == self._number and self._is_under_way:
            self._fail("its user waits no longer")
        self.ended.pop(number, None)

    def _begin_answer(self) -> None:
        if not self._is_under_way:
            self._fail("more came than an answer" if self._number else "BadStatusLine: the server speaks first")
        self._headers = None
        self._read.clear()
        self._body.clear()

    def _end_head(self) -> None:
        self._headers = self._read.copy()
        self._most = self._most_body + _MOST_HEAD_BYTES

    def _end_answer(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS or not self._is_under_way:
            return
        self.ended[self._number] = Answer(status, self._headers or {}, b"".join(self._body))
        self._body.clear()
        self._is_under_way = False
        if not self._parser.should_keep_alive():
            self._fail("the server keeps no connections")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        if self._is_under_way:
            self.ended[self._number] = Unanswered(reason, may_have_begun=True)
            self._is_under_way = False


class _Http:
    """The base for threads and tasks; ``address`` has a path where Triton is not at the server's root."""

    _kind: ClassVar[Any]  # of connections

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.codec: Codec = HttpCodec()
        self.host = host
        self.address = self.codec.address = f"{'http' if tls is None else 'https'}://{address}"
        self.codec.needs_grpcio = ""
        place = urllib.parse.urlsplit(self.address)
        port = place.port or (80 if tls is None else 443)
        server = Server(host, port, self.address, Http1, None if tls is None else tls_context(tls))
        self._connections = self._kind(server)
        self._base = place.path
        self._first_lines = f" HTTP/1.1\r\nHost: {place.netloc}\r\n"

    def stream(self, message: Any, timeout_s: float) -> NoReturn:
        raise CallerError(f"{self.address} is HTTP, which has no streams; use a gRPC URL for decoupled models")

    def _request(self, message: HttpMessage) -> Request:
        method, path, body, headers, most_bytes = message
        head = f"{method} {self._base}{path}{self._first_lines}"
        for name, value in headers.items():
            head += f"{name}: {value}\r\n"
        if body is None:
            return Request((f"{head}\r\n".encode(),), most_bytes)
        # From Python 3.12 on, asyncio tries forever to send a last part that is empty.
        return Request(
            (f"{head}Content-Length: {sum(map(len, body))}\r\n\r\n".encode(), *filter(len, body)), most_bytes
        )

    def _checked(self, answer: Answer) -> Answer:
        error = answer.error(self.address)
        if error is None:
            return answer
        try:
            raise error
        finally:
            del error  # else its traceback would keep this frame and all callers' frames, and so a call's memory


class HttpTransport(_Http, Transport):
    _kind = Connections

    def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        return self._checked(self._connections.call(self._request(message), timeout_s))

    def close(self) -> None:
        self._connections.close()


class AsyncHttpTransport(_Http, AsyncTransport):
    _kind = AsyncConnections

    async def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        return self._checked(await self._connections.call(self._request(message), timeout_s))

    async def close(self) -> None:
        await self._connections.close()
