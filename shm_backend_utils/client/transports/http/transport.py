"""Connections over HTTP."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncGenerator, Generator
from typing import Any, Final, NoReturn

import aiohttp

from ....errors import CallerError, ClosedError
from ...errors import deadline_exceeded, unavailable
from ...options import Tls
from ..transport import AsyncTransport, Transport, is_cancelled
from .codec import Answer, HttpCodec, HttpMessage
from .connections import TLS_HANDSHAKE, TLS_HANDSHAKE_BREAKS, HttpConnections

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_LARGE: Final = 1 << 16  # bytes; aiohttp sends a file piece by piece, and bytes in one


class HttpTransport(Transport):
    """For threads. May be used from several at once.

    tritonclient's own blocking client is bound to the thread that made it, and leaves gevent's descriptors behind in
    every thread.
    """

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.codec = HttpCodec()
        self.host = host
        self.address = self.codec.address = _shown(address, tls)
        self._connections = HttpConnections(address, self.address, None if tls is None else _context(tls))

    def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        return _checked(self._connections.send(*message, timeout_s=timeout_s), self.address)

    def stream(self, message: Any, patience_s: float) -> Generator[Any, None, None]:
        _refuse_streams(self.address)

    def close(self) -> None:
        self._connections.close()


class AsyncHttpTransport(AsyncTransport):
    """For tasks of one event loop, which must be running when it is made."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.codec = HttpCodec()
        self.host = host
        self.address = self.codec.address = _shown(address, tls)
        self._is_secure = tls is not None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else _context(tls)),
            timeout=aiohttp.ClientTimeout(),  # none; each call has one of its own
            auto_decompress=False,  # tritonclient does
        )
        self._under_way: set[asyncio.Future[Answer]] = set()
        self._is_closed = False

    async def send(self, message: HttpMessage, timeout_s: float) -> Answer:
        self._check_is_open()
        exchange = asyncio.ensure_future(self._exchange(message))
        self._under_way.add(exchange)
        exchange.add_done_callback(self._under_way.discard)
        try:
            answer = await asyncio.wait_for(exchange, timeout_s)
        except asyncio.TimeoutError:
            raise deadline_exceeded() from None
        except asyncio.CancelledError:
            if self._is_closed and not is_cancelled():
                raise ClosedError("this client") from None
            raise
        except aiohttp.ClientConnectorError as error:
            doing = TLS_HANDSHAKE if self._is_secure and isinstance(error.os_error, TLS_HANDSHAKE_BREAKS) else ""
            raise unavailable(self.address, f"{doing}{type(error).__name__}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise unavailable(self.address, f"{type(error).__name__}: {error}") from None
        return _checked(answer, self.address)

    def stream(self, message: Any, patience_s: float) -> AsyncGenerator[Any, None]:
        _refuse_streams(self.address)

    async def close(self) -> None:
        self._is_closed = True
        for exchange in list(self._under_way):  # aiohttp lets them wait for answers that it does not read any more
            exchange.cancel()
        await self._session.close()

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this client")

    async def _exchange(self, message: HttpMessage) -> Answer:
        method, path, body, headers, most_bytes = message
        content = io.BytesIO(body) if body is not None and len(body) > _LARGE else body
        async with self._session.request(method, f"{self.address}{path}", data=content, headers=headers) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, names, await _read(response, most_bytes))


async def _read(response: aiohttp.ClientResponse, most_bytes: int | None) -> bytes:
    if most_bytes is None:
        return await response.read()
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"an answer of more than {most_bytes} bytes")
    return bytes(body)


def _shown(address: str, tls: Tls | None) -> str:
    return f"{'http' if tls is None else 'https'}://{address}"


def _checked(answer: Answer, address: str) -> Answer:
    error = answer.error(address)
    if error is None:
        return answer
    try:
        raise error
    finally:
        del error  # its traceback has this frame, and keeps those of all callers: a call's memory would stay in use


def _refuse_streams(address: str) -> NoReturn:
    raise CallerError(f"{address} is HTTP, which has no streams; use a gRPC URL for decoupled models")


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.root_certificates)
    if tls.certificate_chain is not None:
        context.load_cert_chain(tls.certificate_chain, tls.private_key)
    return context
