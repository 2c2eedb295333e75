"""Requests over HTTP."""

from __future__ import annotations

import asyncio
import ssl
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator
from http.client import HTTPException
from typing import Any, Final

import aiohttp
import gevent
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from ..descriptor import GENERATION_PARAMETER
from ..errors import CallerError, ShmError
from .errors import deadline_exceeded, translated, unavailable
from .options import Tls
from .transport import Request, Transport

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_HANDSHAKE: Final = "TLS handshake: "
_BREAKS: Final = (
    ssl.SSLError,
    ConnectionResetError,
    HTTPException,
)  # how a server without TLS ends a handshake; which, is chance
_NEVER_S: Final = 1e6  # tritonclient has limits of its own; ours come with each request


class _Http(Transport):
    """What both have in common."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        self.host = host
        self.address = f"{'http' if tls is None else 'https'}://{address}"
        self._module = tritonclient.http
        self._address = address
        self._tls = tls

    def encode(self, request: Request) -> dict[str, Any]:
        algorithm = request.options.get("compression")
        compression = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
        return self._arguments(request) | compression

    async def infer(self, message: dict[str, Any], timeout_s: float, generation: int = 0) -> Any:
        if generation:
            message = {**message, "parameters": {**message["parameters"], GENERATION_PARAMETER: generation}}
        return await self._call(timeout_s, "infer", **message)

    async def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        config: dict[str, Any] = await self._call(timeout_s, "get_model_config", model, version)
        return config

    async def register(self, name: str, key: str, byte_size: int, timeout_s: float) -> None:
        await self._call(timeout_s, "register_system_shared_memory", name, key, byte_size)

    async def unregister(self, name: str, timeout_s: float) -> None:
        await self._call(timeout_s, "unregister_system_shared_memory", name)

    def stream(self, request: Request, patience_s: float) -> AsyncGenerator[Any, None]:
        raise CallerError(f"{self.address} is HTTP, which has no streams; use a gRPC URL for decoupled models")

    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        output = response.get_output(name)
        return None if output is None else (output["datatype"], tuple(output["shape"]))

    async def _call(self, timeout_s: float, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await self._ask(timeout_s, method, *arguments, **named)
        except ShmError:
            raise
        except InferenceServerException as error:
            raise translated(error.status(), error.message() or "", self.address) from None

    @abstractmethod
    async def _ask(self, timeout_s: float, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of tritonclient's client."""


class HttpTransport(_Http):
    """For threads. tritonclient's client is bound to the thread that made it, so every thread has one of its own."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        super().__init__(address, host, tls)
        self._of_thread = threading.local()

    async def close(self) -> None:
        self._drop_client()

    async def _ask(self, timeout_s: float, method: str, *arguments: Any, **named: Any) -> Any:
        mine = self._client()
        try:
            with gevent.Timeout(timeout_s):
                answer = getattr(mine.client, method)(*arguments, **named)
        except gevent.Timeout:
            self._drop_client()  # its connection still waits for the late answer
            raise deadline_exceeded() from None
        except (OSError, HTTPException) as error:  # no server, one that died, or one that does not speak HTTP
            self._drop_client()
            is_handshake = self._tls is not None and not mine.has_answered and isinstance(error, _BREAKS)
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise unavailable(self.address, f"{_HANDSHAKE if is_handshake else ''}{reason}") from None
        mine.has_answered = True
        return answer

    def _client(self) -> _ClientOfThread:
        mine = getattr(self._of_thread, "mine", None)
        if mine is None:
            tls = {}
            if self._tls is not None:
                files = {
                    "ca_certs": self._tls.root_certificates,
                    "keyfile": self._tls.private_key,
                    "certfile": self._tls.certificate_chain,
                }
                tls = {"ssl": True, "ssl_options": {name: file for name, file in files.items() if file}}
            client = tritonclient.http.InferenceServerClient(
                self._address, connection_timeout=_NEVER_S, network_timeout=_NEVER_S, **tls
            )
            mine = self._of_thread.mine = _ClientOfThread(client)
        return mine

    def _drop_client(self) -> None:
        mine = self._of_thread.__dict__.pop("mine", None)
        if mine is not None:
            mine.client.close()


class _ClientOfThread:
    """A thread's client."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.has_answered = False


class AsyncHttpTransport(_Http):
    """For tasks of one event loop, which must be running when it is made."""

    def __init__(self, address: str, host: str, tls: Tls | None) -> None:
        super().__init__(address, host, tls)
        self._client = tritonclient.http.aio.InferenceServerClient(
            address, conn_timeout=_NEVER_S, ssl=tls is not None, ssl_context=None if tls is None else _context(tls)
        )

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, timeout_s: float, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await asyncio.wait_for(getattr(self._client, method)(*arguments, **named), timeout_s)
        except asyncio.TimeoutError:
            raise deadline_exceeded() from None
        except aiohttp.ClientConnectorError as error:
            doing = _HANDSHAKE if self._tls is not None and isinstance(error.os_error, _BREAKS) else ""
            raise unavailable(self.address, f"{doing}{type(error).__name__}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise unavailable(self.address, f"{type(error).__name__}: {error}") from None


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.root_certificates)
    if tls.certificate_chain is not None:
        context.load_cert_chain(tls.certificate_chain, tls.private_key)
    return context
