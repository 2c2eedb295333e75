"""The four clients in one shape, so that a test is written once: blocking or not, over gRPC or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy.typing as npt

from shm_backend_utils.client import (
    AsyncPreparedCall,
    AsyncShmClient,
    ClientStats,
    Explanation,
    PoolOptions,
    Result,
    ShmClient,
)
from shm_backend_utils.client.transports.connect import Connectable
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

__all__ = ["FLAVOURS", "AnyClient", "Flavour", "LoopedClient", "url_of"]

T = TypeVar("T")

FLAVOURS: Final = ("grpc", "http", "grpc aio", "http aio")


class LoopedClient:
    """An AsyncShmClient with the methods of ShmClient. Its event loop runs while one of them does."""

    def __init__(self, url: str | Connectable, **options: Any) -> None:
        self.aio = AsyncShmClient(url, **options)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Awaitable[T]) -> T:
        """Run the event loop until this is done."""
        return self._loop.run_until_complete(work)

    def infer(self, model: str, inputs: Mapping[str, Any], **named: Any) -> Result:
        return self.run(self.aio.infer(model, inputs, **named))

    def submit(self, model: str, inputs: Mapping[str, Any], **named: Any) -> LoopedTask:
        async def submit() -> asyncio.Task[Result]:
            return self.aio.submit(model, inputs, **named)

        return LoopedTask(self, self.run(submit()))

    def prepare(self, model: str, inputs: Mapping[str, Any], **named: Any) -> LoopedCall:
        return LoopedCall(self, self.run(self.aio.prepare(model, inputs, **named)))

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

    def explain(self, model: str, **named: Any) -> Explanation:
        return self.run(self.aio.explain(model, **named))

    def stats(self) -> ClientStats:
        async def stats() -> ClientStats:
            return self.aio.stats()

        return self.run(stats())

    def close(self) -> None:
        if not self._loop.is_closed():
            self.run(self.aio.close())
            self.run(self._loop.shutdown_default_executor())
            self._loop.close()

    def __enter__(self) -> LoopedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class LoopedTask:
    """What submit gives: a task with the methods of a future."""

    client: LoopedClient
    task: asyncio.Task[Result]

    def result(self) -> Result:
        return self.client.run(self.task)

    def cancel(self) -> bool:
        return self.task.cancel()


@dataclass(frozen=True)
class LoopedCall:
    """An AsyncPreparedCall with the methods of PreparedCall."""

    client: LoopedClient
    call: AsyncPreparedCall

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.call.inputs

    @property
    def path(self) -> str:
        return self.call.path

    def infer(self, **named: Any) -> Result:
        return self.client.run(self.call.infer(**named))

    def close(self) -> None:
        self.call.close()

    def __enter__(self) -> LoopedCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


AnyClient = ShmClient | LoopedClient


@dataclass(frozen=True)
class Flavour:
    """One of the four, with the address of a server or a harness, and the memory that its clients take by default."""

    url: Any
    is_aio: bool
    region: RegionName = "auto"

    def client(self, **options: Any) -> AnyClient:
        """Return a client to be closed by whoever asked. Unless told otherwise, no call is too small for a slot."""
        options = {"timeout_s": 30, "inline_bytes": 0, "pool": PoolOptions(region=self.region), **options}
        return LoopedClient(self.url, **options) if self.is_aio else ShmClient(self.url, **options)

    @property
    def has_streams(self) -> bool:
        return not str(self.url).startswith("http")


def url_of(server: EmbeddedServer, protocol: str) -> str:
    """Return the server's address as clients take it."""
    return {"grpc": server.grpc_url, "http": f"http://{server.http_url}"}[protocol]
