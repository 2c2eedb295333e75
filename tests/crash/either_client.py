"""The blocking client, and the asyncio one behind the same methods, so that the body of a test is written once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy.typing as npt

from shm_backend_utils.client import (
    AsyncPreparedCall,
    AsyncShmClient,
    ClientStats,
    Explanation,
    PreparedCall,
    Result,
    ShmClient,
)
from shm_backend_utils.server import EmbeddedServer

__all__ = [
    "FLAVOURS",
    "TWO_FLAVOURS",
    "AwaitedCall",
    "AwaitedClient",
    "EitherCall",
    "EitherClient",
    "open_client",
    "url_of",
]

T = TypeVar("T")

FLAVOURS: Final = ("grpc", "http", "grpc aio", "http aio")
"""Every protocol with every client."""

TWO_FLAVOURS: Final = ("grpc", "http aio")
"""Each protocol once, and each client: enough where neither decides what happens."""


class AwaitedClient:
    """An :class:`AsyncShmClient` on an event loop that runs in a thread. Calls of several threads are its tasks.

    Its own end is that of the ``with`` block; :meth:`close` only closes the client.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._client = AsyncShmClient(url, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self._await(self._client.__aenter__())
        except BaseException:
            self._end()
            raise

    def infer(self, model: str, inputs: Mapping[str, Any], **named: Any) -> Result:
        return self._await(self._client.infer(model, inputs, **named))

    def prepare(
        self, model: str, inputs: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]], **named: Any
    ) -> AwaitedCall:
        return AwaitedCall(self._loop, self._await(self._client.prepare(model, inputs, **named)))

    def explain(self, model: str) -> Explanation:
        return self._await(self._client.explain(model))

    def stats(self) -> ClientStats:
        async def ask() -> ClientStats:
            return self._client.stats()

        return self._await(ask())

    def close(self) -> None:
        self._await(self._client.close())

    def __enter__(self) -> AwaitedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            self._end()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class AwaitedCall:
    """An :class:`AsyncPreparedCall` behind the methods of a :class:`PreparedCall`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: AsyncPreparedCall) -> None:
        self._loop = loop
        self._call = call

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        return self._call.inputs

    def infer(self, *, timeout_s: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(self._call.infer(timeout_s=timeout_s), self._loop).result()

    def close(self) -> None:
        self._call.close()

    def __enter__(self) -> AwaitedCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


EitherClient = ShmClient | AwaitedClient
EitherCall = PreparedCall | AwaitedCall


def url_of(server: EmbeddedServer, flavour: str) -> str:
    """Return the server's address for a flavour."""
    return f"http://{server.http_url}" if flavour.startswith("http") else f"grpc://{server.grpc_url}"


@contextlib.contextmanager
def open_client(flavour: str, url: str, **settings: Any) -> Iterator[EitherClient]:
    """Make a client of a flavour; it is closed at the end of the block."""
    make = AwaitedClient if flavour.endswith("aio") else ShmClient
    with make(url, **settings) as client:
        yield client
