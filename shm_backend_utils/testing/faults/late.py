"""Answers that come late, or after their deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

from ...client.errors import deadline_exceeded
from ...client.transports.connect import Connectable
from ...client.transports.transport import AsyncTransport, Transport

__all__ = ["Late"]


class Late:
    """A server that executes requests at once, and answers late. Clients take it in place of a URL.

    A client with a shorter timeout gets a DeadlineExceededError, although the model has done the work.

    Parameters
    ----------
    server : Connectable
        Such as a :class:`.ModelHarness`.
    seconds : float
        How late. May be changed at any time.
    """

    def __init__(self, server: Connectable, seconds: float) -> None:
        self._server = server
        self.seconds = seconds

    def connect(self) -> Transport:
        """Return a transport for threads."""
        return _LateTransport(self._server.connect(), self)

    def connect_async(self) -> AsyncTransport:
        """Return a transport for tasks of the running event loop."""
        return _AsyncLateTransport(self._server.connect_async(), self)

    def pause_s(self, patience_s: float) -> float:
        """Return how long an answer is held back whose receiver goes after some seconds."""
        return max(0.0, min(self.seconds, patience_s))

    def check(self, patience_s: float) -> None:
        """Raise DeadlineExceededError if the receiver has gone meanwhile."""
        if self.seconds >= patience_s:
            raise deadline_exceeded()


class _LateTransport(Transport):
    def __init__(self, inner: Transport, late: Late) -> None:
        self.codec, self.address, self.host = inner.codec, inner.address, inner.host
        self._inner = inner
        self._late = late

    def send(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        answer = self._inner.send(message, timeout_s)
        left_s = deadline - time.monotonic()
        time.sleep(self._late.pause_s(left_s))
        self._late.check(left_s)
        return answer

    def stream(self, message: Any, patience_s: float) -> Generator[Any, None, None]:
        for answer in self._inner.stream(message, patience_s):
            time.sleep(self._late.pause_s(patience_s))
            self._late.check(patience_s)
            yield answer

    def close(self) -> None:
        self._inner.close()


class _AsyncLateTransport(AsyncTransport):
    def __init__(self, inner: AsyncTransport, late: Late) -> None:
        self.codec, self.address, self.host = inner.codec, inner.address, inner.host
        self._inner = inner
        self._late = late

    async def send(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        answer = await self._inner.send(message, timeout_s)
        left_s = deadline - time.monotonic()
        await asyncio.sleep(self._late.pause_s(left_s))
        self._late.check(left_s)
        return answer

    async def stream(self, message: Any, patience_s: float) -> AsyncGenerator[Any, None]:
        async for answer in self._inner.stream(message, patience_s):
            await asyncio.sleep(self._late.pause_s(patience_s))
            self._late.check(patience_s)
            yield answer

    async def close(self) -> None:
        await self._inner.close()
