"""Streams of answers for tasks, over channels of grpcio. How they end: see :mod:`.streams`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from ....errors import ClosedError
from .streams import AHEAD, DRAIN_S

__all__ = ["AsyncReading", "AsyncStreams"]


class AsyncReading:
    """A stream that a task of its own reads, so that cancelling the user's task does not cancel the call at once."""

    def __init__(self, call: Any) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()  # the last one is gRPC's EOF, or an error
        self.wanted = asyncio.Semaphore(AHEAD)
        self._call = call
        self._is_left = False
        self.task = asyncio.ensure_future(self._read())

    def leave(self) -> None:
        """Take no more answers. Twice is fine."""
        if not self._is_left and not self.task.done():
            self._is_left = True
            self.wanted.release()
            self.task.get_loop().call_later(DRAIN_S, self.task.cancel)

    async def _read(self) -> None:
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                if not self._is_left:
                    self.answers.put_nowait(answer)
                    await self.wanted.acquire()
            self.answers.put_nowait(grpc.aio.EOF)
        except BaseException as error:  # else the user would wait for answers in vain
            self.answers.put_nowait(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._call.cancel()


class AsyncStreams:
    """The streams of one connection, for tasks."""

    def __init__(self) -> None:
        self._open: set[AsyncReading] = set()

    def begin(self, call: Any) -> AsyncReading:
        reading = AsyncReading(call)
        self._open.add(reading)
        reading.task.add_done_callback(lambda _: self._open.discard(reading))
        return reading

    async def close(self) -> None:
        readings = list(self._open)
        for reading in readings:
            reading.answers.put_nowait(ClosedError("this client"))
            reading.leave()
        await asyncio.gather(*[reading.task for reading in readings], return_exceptions=True)
