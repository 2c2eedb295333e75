"""Streams of answers, each read a little ahead of its user, and read on for a moment when that has left it.

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
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc.aio

from ....errors import ClosedError

__all__ = ["AsyncReading", "AsyncStreams", "Reading", "Streams"]

AHEAD: Final = 2
"""With one more answer than so many that its user has not taken, a reader waits. HTTP/2 has the server wait then."""
DRAIN_S: Final = 1.0
KEPT_S: Final = 1.0
"""An idle stream ends after so long: a server that is to stop waits for it, Triton 2.51 for 40 s."""


class Reading:
    """A stream that a thread reads, as gRPC's own iterator has no timeout. It carries one request after another."""

    def __init__(self, begin: Callable[[Iterator[Any]], Any], key: object, streams: Streams) -> None:
        self.key = key
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the last one is None
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None, or an error, once it has ended
        self.wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike a semaphore, safe from interrupts
        for _ in range(AHEAD):
            self.wanted.put(True)
        self._left = streams.left
        self.call = begin(_requests(self.requests, weakref.ref(self), streams.idle))
        given = self.call, self.answers, self.wanted
        self.thread = threading.Thread(target=_read, args=given, name="shm stream reader", daemon=True)

    def leave(self) -> None:
        """Want no more answers. Waits for nothing, and takes no lock: a finalizer may do it. Twice is fine."""
        self.requests.put(None)  # so that the server ends the stream after the last response
        self._left.put(self)


class Streams:
    """The streams of one connection, for threads. A thread of theirs cancels those that were left and do not end."""

    def __init__(self) -> None:
        self.idle: set[Reading] = set()
        self.left: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._used: set[Reading] = set()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self.left.put, None).atexit = False

    def reading(self, begin: Callable[[Iterator[Any]], Any], key: object) -> Reading:
        """Return an idle stream of this key, or a new one, which ``begin`` makes of its requests.

        Nothing has begun, so an interrupt leaves nothing behind: a stream that nobody has ends.
        """
        for reading in list(self.idle):
            if reading.key == key:
                with contextlib.suppress(KeyError):  # another thread has taken it, or it has ended
                    self.idle.remove(reading)
                    if reading.thread.is_alive() and reading.answers.empty():
                        return reading
        return Reading(begin, key, self)

    def begin(self, reading: Reading, request: Any) -> None:
        """Send a request; the stream is to be kept or left then, whatever this raises."""
        if self._thread is None:
            thread = threading.Thread(target=_drain, args=(self.left,), name="shm stream drain", daemon=True)
            thread.start()
            self._thread = thread
        self._used.add(reading)
        reading.requests.put(request)
        if reading.thread.ident is None:
            reading.thread.start()

    def keep(self, reading: Reading) -> None:
        """Keep a stream for the next request, which comes soon or not at all: all answers have come."""
        self._used.discard(reading)
        self.idle.add(reading)

    def leave(self, reading: Reading) -> None:
        """Forget a stream that has ended, or that its user leaves."""
        reading.leave()
        self._used.discard(reading)

    def close(self) -> None:
        """Leave every stream, whose users get a ClosedError, and wait until all have ended or were cancelled."""
        for reading in [*self._used, *self.idle]:
            reading.leave()
            reading.answers.put(ClosedError("this client"))
        self.left.put(None)
        if self._thread is not None:
            self._thread.join()


def _requests(requests: queue.SimpleQueue[Any], reading: weakref.ref[Reading], idle: set[Reading]) -> Iterator[Any]:
    """Yield what is to be sent; no more when the stream was idle for a while, or nobody has it."""
    while True:
        try:
            request = requests.get(timeout=KEPT_S)
        except queue.Empty:
            its = reading()
            if its is None:
                return
            with contextlib.suppress(KeyError):
                idle.remove(its)
                return
            del its
        else:
            if request is None:
                return
            yield request
            del request


def _read(call: Any, answers: queue.SimpleQueue[Any], wanted: queue.SimpleQueue[bool]) -> None:
    is_wanted = True
    try:
        for answer in call:
            if is_wanted:
                answers.put(answer)
                is_wanted = wanted.get()
        answers.put(None)
    except Exception as error:  # whoever waits for the answers would wait in vain
        answers.put(error)


def _drain(left: queue.SimpleQueue[Reading | None]) -> None:
    draining: deque[tuple[float, Reading]] = deque()
    while True:
        try:
            reading = left.get(timeout=max(draining[0][0] - time.monotonic(), 0) if draining else None)
        except queue.Empty:
            draining.popleft()[1].call.cancel()
            continue
        if reading is None:
            left.put(None)  # for another such thread: two first streams may have begun at once
            break
        if reading.thread.is_alive():
            reading.wanted.put(False)
            draining.append((time.monotonic() + DRAIN_S, reading))
        else:
            reading.call.cancel()
        del reading
    for deadline, reading in draining:
        reading.thread.join(max(deadline - time.monotonic(), 0))
        reading.call.cancel()


class AsyncReading:
    """A stream that a task of its own reads: if its user's did, to cancel that task would cancel the call at once."""

    def __init__(self, call: Any) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()  # the last one is gRPC's EOF, or an error
        self.wanted = asyncio.Semaphore(AHEAD)
        self._call = call
        self._is_left = False
        self.task = asyncio.ensure_future(self._read())

    def leave(self) -> None:
        """Want no more answers. Twice is fine."""
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
        except BaseException as error:  # whoever waits for the answers would wait in vain
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
        """Begin to read the answers of a call."""
        reading = AsyncReading(call)
        self._open.add(reading)
        reading.task.add_done_callback(lambda _: self._open.discard(reading))
        return reading

    async def close(self) -> None:
        """Leave every stream, whose users get a ClosedError, and wait until all have ended or were cancelled."""
        readings = list(self._open)
        for reading in readings:
            reading.answers.put_nowait(ClosedError("this client"))
            reading.leave()
        await asyncio.gather(*[reading.task for reading in readings], return_exceptions=True)
