"""Connections over HTTP."""

from __future__ import annotations

import urllib.parse
from typing import Any, ClassVar, Final, NoReturn

from ....errors import CallerError
from ...options import Tls, tls_context
from ..aio_connections import AsyncConnections
from ..connections import Connections
from ..conversation import Server
from ..messages import Codec
from ..transport import AsyncTransport, Transport
from .codec import Answer, HttpCodec, HttpMessage
from .http1 import Http1, Request

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_PORTS: Final = {"http": 80, "https": 443}


class _Http:
    """The base for threads and tasks; ``address`` has a path where Triton is not at the server's root."""

    _kind: ClassVar[Any]  # of connections

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.codec: Codec = HttpCodec()
        self.host = host
        self.address = self.codec.address = f"{'http' if tls is None else 'https'}://{address}"
        self.codec.needs_grpcio = ""
        place = urllib.parse.urlsplit(self.address)
        port = place.port or _PORTS[place.scheme]
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
        # From Python 3.12 on, asyncio tries without end to send an empty part that is the last one.
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
            del error  # its traceback has this frame, and keeps those of all callers: a call's memory would stay in use


class HttpTransport(_Http, Transport):
    _kind = Connections

    def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        return self._checked(self._connections.exchange(self._request(message), timeout_s))

    def close(self) -> None:
        self._connections.close()


class AsyncHttpTransport(_Http, AsyncTransport):
    _kind = AsyncConnections

    async def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        return self._checked(await self._connections.exchange(self._request(message), timeout_s))

    async def close(self) -> None:
        await self._connections.close()
