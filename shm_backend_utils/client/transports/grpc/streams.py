"""Streams of answers. Each is read a little ahead of its user, and for a moment after its user has left it.

Triton 2.51 and 2.73 crash when a stream is cancelled while a response is written, once in some 20 to 200 times. Most
streams end by themselves soon, and those that do not have long pauses between responses. So a stream is cancelled only
when it has not ended ``DRAIN_S`` after its user has left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import grpc.aio

from ....errors import ClosedError

__all__ = ["AHEAD", "AsyncReading", "AsyncStreams", "Reading", "StreamRequest", "Streams", "Take"]

AHEAD: Final = 2
"""When one more answer than this waits for the user, grpcio's reader pauses, and so does the server."""
DRAIN_S: Final = 1.0

Take = Callable[[Any], object]


class StreamRequest(NamedTuple):
    """A request with any number of answers. It is cancelled, or kept for the next one, or neither."""

    ahead: int  # read up to one answer more than this before the user asks
    read: Callable[[Take], object]  # sends the request, and passes on each answer
    cancel: Callable[[], object]  # while read() runs
    keep: Callable[[], object]  # keeps the connection for the next request, after read() has ended well


class Reading:
    """A call that a thread reads, because gRPC's own iterator has no timeout."""

    def __init__(self, request: StreamRequest, streams: Streams) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the last one is None or an error
        self.wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike a semaphore, safe from interrupts
        for _ in range(request.ahead):
            self.wanted.put(True)
        self.is_wanted = True
        self._streams = streams
        self._cancels = [request.cancel]  # a list's pop is atomic: a kept request is never cancelled
        self.thread = threading.Thread(target=self._read, args=(request,), name="shm stream reader", daemon=True)

    def leave(self) -> None:
        """Take no more answers. This neither waits nor locks, so a finalizer may call it. Twice is fine."""
        self._streams.used.discard(self)
        self._streams.left.put(self)

    def cancel(self) -> None:
        """End the call now, if it has not ended."""
        with contextlib.suppress(IndexError):
            self._cancels.pop()()

    def _read(self, request: StreamRequest) -> None:
        try:
            request.read(self._take)
            with contextlib.suppress(IndexError):
                self._cancels.pop()
                request.keep()
            self.answers.put(None)
        except Exception as error:  # else the user would wait for answers in vain
            self.answers.put(error)
        self._streams.used.discard(self)

    def _take(self, answer: Any) -> None:
        if self.is_wanted:
            self.answers.put(answer)
            self.is_wanted = self.wanted.get()


class Streams:
    """The streams of one connection, for threads. A thread cancels those that users left and that do not end."""

    def __init__(self) -> None:
        self.left: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self.used: set[Reading] = set()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self.left.put, None).atexit = False

    def begin(self, reading: Reading) -> None:
        """Start the thread of a call. Afterwards call leave(), even if this raises, unless all answers have come."""
        if self._thread is None:
            thread = threading.Thread(target=_drain, args=(self.left,), name="shm stream drain", daemon=True)
            thread.start()
            self._thread = thread
        self.used.add(reading)
        reading.thread.start()

    def close(self) -> None:
        """Leave every stream, and wait until all have ended or were cancelled. Their users get a ClosedError."""
        for reading in list(self.used):
            reading.leave()
            reading.answers.put(ClosedError("this client"))
        self.left.put(None)
        if self._thread is not None:
            self._thread.join()


def _drain(left: queue.SimpleQueue[Reading | None]) -> None:
    draining: deque[tuple[float, Reading]] = deque()
    while True:
        try:
            reading = left.get(timeout=max(draining[0][0] - time.monotonic(), 0) if draining else None)
        except queue.Empty:
            draining.popleft()[1].cancel()
            continue
        if reading is None:
            left.put(None)  # for a second drain thread, if two first streams began at once
            break
        if reading.thread.is_alive() or reading.thread.ident is None:  # an interrupt came as it started
            reading.wanted.put(False)
            draining.append((time.monotonic() + DRAIN_S, reading))
        del reading
    for deadline, reading in draining:
        with contextlib.suppress(RuntimeError):  # the thread has not started
            reading.thread.join(max(deadline - time.monotonic(), 0))
        reading.cancel()


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
