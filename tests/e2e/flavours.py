"""The four clients in one shape, so that a test is written once: blocking or not, over gRPC or HTTP."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from shm_backend_utils.client import AsyncShmClient, PoolOptions, PreparedCall, Result, ShmClient
from shm_backend_utils.client.transports.transport import Connectable
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

T = TypeVar("T")

FLAVOURS: Final = ("grpc", "http", "grpc aio", "http aio")
"""Every protocol with every client."""

TWO_FLAVOURS: Final = ("grpc", "http aio")
"""Each protocol once, and each client: enough where neither decides what happens."""


class Awaited:
    """Something of asyncio: its methods are called in a loop that runs in another thread, and waited for."""

    def __init__(self, thing: Any, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._thing = thing
        self._run = run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        return (lambda *values, **named: self._run(partial(found, *values, **named))) if callable(found) else found

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AwaitedTask(Awaited):
    """What submit gives: a task with the methods of a future."""

    def result(self, timeout_s: float | None = None) -> Result:
        result: Result = self._run(lambda: asyncio.wait_for(self._thing, timeout_s))
        return result

    def cancel(self) -> bool:
        self._thing.get_loop().call_soon_threadsafe(self._thing.cancel)
        self._run(lambda: asyncio.wait([self._thing]))
        return bool(self._thing.cancelled())


class AwaitedClient(Awaited):
    """An :class:`AsyncShmClient` on an event loop that runs in a thread, behind the methods of :class:`ShmClient`.

    Calls of several threads are its tasks. The loop ends with the ``with`` block; ``close`` only closes the client.
    """

    def __init__(self, url: str | Connectable, **options: Any) -> None:
        self.aio = AsyncShmClient(url, **options)
        super().__init__(self.aio, self._call)
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.run(self.aio.__aenter__())
        except BaseException:
            self._end()
            raise

    def run(self, work: Awaitable[T]) -> T:
        """Have it done in the loop, and return its result; a forked child has no such thread, and does it itself."""

        async def wait() -> T:
            return await work

        if os.getpid() != self._process:
            return asyncio.new_event_loop().run_until_complete(wait())
        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def submit(self, model: str, inputs: Mapping[str, Any], **named: Any) -> AwaitedTask:
        async def submit() -> asyncio.Task[Result]:
            return self.aio.submit(model, inputs, **named)

        return AwaitedTask(self.run(submit()), self._call)

    def prepare(self, model: str, inputs: Mapping[str, Any], **named: Any) -> Awaited:
        return Awaited(self.run(self.aio.prepare(model, inputs, **named)), self._call)

    def stream(self, model: str, inputs: Mapping[str, Any], **named: Any) -> Iterator[Result]:
        results = self.aio.stream(model, inputs, **named)
        try:
            while True:
                try:
                    yield self.run(results.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self.run(results.aclose())

    def __enter__(self) -> AwaitedClient:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._end()

    def _call(self, do: Callable[[], Any]) -> Any:
        async def call() -> Any:
            found = do()
            return await found if inspect.isawaitable(found) else found

        return self.run(call())

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


AnyClient = ShmClient | AwaitedClient
AnyCall = PreparedCall | Awaited


@dataclass(frozen=True)
class Flavour:
    """One of the four, with the address of a server or a harness, and the memory that its clients take by default."""

    url: Any
    is_aio: bool
    region: RegionName = "auto"

    def client(self, **options: Any) -> AnyClient:
        """Return a client to be closed by whoever asked. Unless told otherwise, no call is too small for a slot."""
        options = {"timeout_s": 30, "inline_bytes": 0, "pool": PoolOptions(region=self.region), **options}
        return AwaitedClient(self.url, **options) if self.is_aio else ShmClient(self.url, **options)

    @property
    def has_streams(self) -> bool:
        return not str(self.url).startswith("http")


def url_of(server: EmbeddedServer, flavour: str) -> str:
    return f"http://{server.http_url}" if flavour.startswith("http") else server.grpc_url


def client_of(flavour: str, url: str, **options: Any) -> AbstractContextManager[AnyClient]:
    """Make a client of a flavour, to be closed by whoever asked."""
    return AwaitedClient(url, **options) if flavour.endswith("aio") else ShmClient(url, **options)
