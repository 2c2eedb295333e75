"""Requests over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import aiohttp
import tritonclient.http

from ..errors import CallerError
from .errors import deadline_exceeded, unavailable
from .http_connections import TLS_HANDSHAKE, TLS_HANDSHAKE_BREAKS, HttpConnections
from .http_message import Answer, HttpMessage, encode, path_of
from .options import Tls
from .transport import Request, Transport

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_LARGE: Final = 1 << 16  # bytes; aiohttp sends a file piece by piece, and bytes in one
_NO_HEADERS: Final[Mapping[str, str]] = {}


class _Http(Transport):
    """What both have in common. tritonclient encodes the requests and reads the results; it sends nothing.

    Its blocking client is bound to the thread that made it, and leaves gevent's descriptors behind in every thread.
    """

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.host = host
        self.address = f"{'http' if tls is None else 'https'}://{address}"
        self._module = tritonclient.http

    def encode(self, request: Request) -> HttpMessage:
        arguments = self._arguments(request)
        if "compression" in request.options:
            arguments["compression"] = request.options["compression"]
        return encode(arguments)

    async def infer(self, message: HttpMessage, timeout_s: float, generation: int = 0) -> Any:
        body, headers = message.form(generation)
        return (await self._ask(message.path, timeout_s, body, headers)).result()

    async def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        answer = await self._ask(f"{path_of('models', model, version)}/config", timeout_s)
        config: dict[str, Any] = answer.json()
        return config

    async def register(self, name: str, key: str, byte_size: int, timeout_s: float) -> None:
        order = json.dumps({"key": key, "offset": 0, "byte_size": byte_size}).encode()
        await self._ask(f"{path_of('systemsharedmemory/region', name)}/register", timeout_s, order)

    async def unregister(self, name: str, timeout_s: float) -> None:
        await self._ask(f"{path_of('systemsharedmemory/region', name)}/unregister", timeout_s, b"")

    def stream(self, request: Request, patience_s: float) -> AsyncGenerator[Any, None]:
        raise CallerError(f"{self.address} is HTTP, which has no streams; use a gRPC URL for decoupled models")

    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        output = response.get_output(name)
        return None if output is None else (output["datatype"], tuple(output["shape"]))

    async def _ask(
        self, path: str, timeout_s: float, body: bytes | None = None, headers: Mapping[str, str] = _NO_HEADERS
    ) -> Answer:
        """Return the answer to a POST, or to a GET where there is no body; raise if it is an error."""
        answer = await self._send("GET" if body is None else "POST", path, body, headers, timeout_s)
        error = answer.error(self.address)
        if error is not None:
            raise error
        return answer

    @abstractmethod
    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer: ...


class HttpTransport(_Http):
    """For threads. May be used from several at once."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        super().__init__(address, host, tls)
        self._connections = HttpConnections(address, self.address, None if tls is None else _context(tls))

    async def close(self) -> None:
        self._connections.close()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        return self._connections.send(method, path, body, headers, timeout_s)


class AsyncHttpTransport(_Http):
    """For tasks of one event loop, which must be running when it is made."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        super().__init__(address, host, tls)
        self._is_secure = tls is not None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else _context(tls)),
            timeout=aiohttp.ClientTimeout(),  # none; each call has one of its own
            auto_decompress=False,  # tritonclient does
        )

    async def close(self) -> None:
        await self._session.close()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        try:
            return await asyncio.wait_for(self._exchange(method, path, body, headers), timeout_s)
        except asyncio.TimeoutError:
            raise deadline_exceeded() from None
        except aiohttp.ClientConnectorError as error:
            doing = TLS_HANDSHAKE if self._is_secure and isinstance(error.os_error, TLS_HANDSHAKE_BREAKS) else ""
            raise unavailable(self.address, f"{doing}{type(error).__name__}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise unavailable(self.address, f"{type(error).__name__}: {error}") from None

    async def _exchange(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        content = io.BytesIO(body) if body is not None and len(body) > _LARGE else body
        async with self._session.request(method, f"{self.address}{path}", data=content, headers=headers) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, names, await response.read())


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.root_certificates)
    if tls.certificate_chain is not None:
        context.load_cert_chain(tls.certificate_chain, tls.private_key)
    return context
