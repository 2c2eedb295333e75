"""Streams of answers for threads. The user's thread reads its own socket; another thread reads grpcio's channel.

Triton 2.51 and 2.73 crash when a stream is cancelled while a response is written, once in some 20 to 200 times. Most
streams end by themselves soon, and those that do not have long pauses between responses. So a stream is cancelled only
when it has not ended ``DRAIN_S`` after its user has left it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ....errors import ClosedError
from ...errors import deadline_exceeded
from ..connections import Connections, Exchange
from .codec import error_of
from .http2 import Http2, Reply, Request

__all__ = ["AHEAD", "DRAIN_S", "ChannelReading", "Reading", "SocketReading", "StreamingHttp2", "Streams"]

AHEAD: Final = 2
"""When one more answer than this waits for the user, the thread that reads pauses, and so does the server."""
DRAIN_S: Final = 1.0
_PINGS_S: Final = 2.0
"""How often to answer the server's pings while users pause. An answer may take two rounds; Triton waits 20 seconds."""
_MOMENT_S: Final = 1e-3  # how long answering pings may delay the user's thread


class Reading(ABC):
    """A call with several answers."""

    @abstractmethod
    def next_answer(self, timeout_s: float) -> Any:
        """Return the next answer, None at the call's end; ClosedError if another thread has ended the call."""

    @abstractmethod
    def end(self) -> None:
        """Drop further answers; cancel the call if it has not ended after ``DRAIN_S``. Twice is fine.

        If its user waits for an answer all the time, closing the connections cancels it.
        """

    @abstractmethod
    def answer_pings(self) -> None:
        """Answer the server's pings, unless a thread of grpcio's does, or the user reads now."""


class ChannelReading(Reading):
    """A call over a channel of grpcio. A thread reads it, because grpcio's iterator has no timeout."""

    def __init__(self, call: Any) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the last one is None or an error
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike a semaphore, safe from interrupts
        for _ in range(AHEAD):
            self._wanted.put(True)
        self._call = call
        self._thread = threading.Thread(target=self._read, name="shm stream reader", daemon=True)

    def next_answer(self, timeout_s: float) -> Any:
        if self._thread.ident is None:
            self._thread.start()
        try:
            answer = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise deadline_exceeded() from None
        if isinstance(answer, BaseException):
            raise answer
        self._wanted.put(True)
        return answer

    def end(self) -> None:
        self.answers.put(ClosedError("this client"))
        self._wanted.put(False)
        try:
            self._thread.join(DRAIN_S)
        except RuntimeError:  # an interrupt came as the thread started
            time.sleep(DRAIN_S)
        self._call.cancel()

    def answer_pings(self) -> None:
        """Do nothing: grpcio's threads answer them."""

    def _read(self) -> None:
        is_wanted = True
        try:
            for answer in self._call:
                if is_wanted:
                    self.answers.put(answer)
                    is_wanted = self._wanted.get()
            self.answers.put(None)
        except Exception as error:  # else the user would wait for answers in vain
            self.answers.put(error)


class StreamingHttp2(Http2):
    """HTTP/2 whose unread answers fit a socket's buffer: Triton hangs up once that has been full for 20 seconds."""

    receive_window = 2**16 - 1


class SocketReading(Reading):
    """A call over one of the client's own sockets. The user's thread reads it, as waking another one takes longer."""

    def __init__(self, connections: Connections, head: bytes, message: bytes, read: Callable[[bytes], Any]) -> None:
        self._connections = connections
        self._read = read
        self._received: deque[bytes] = deque()
        self._exchange = Exchange(connections, Request(head, message, self._received.append))
        self._reply: Reply | None = None
        self._lock = threading.Lock()  # one thread reads
        self._is_left = False

    def next_answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            try:
                while True:  # as in Connections.call
                    if self._received or self._reply or self._is_left:
                        break
                    self._reply = self._exchange.turn(deadline)
            finally:
                if self._connections.is_closed:  # then no other thread ends it
                    self._exchange.end()
            if self._is_left:
                raise ClosedError("this client")
            if self._received:
                return self._read(self._received.popleft())
            if self._reply and self._reply.status:
                raise error_of(self._reply, self._connections.server.address)
            return None

    def end(self) -> None:
        self._is_left = True
        deadline = time.monotonic() + DRAIN_S
        if self._lock.acquire(timeout=DRAIN_S):
            try:
                with contextlib.suppress(OSError):
                    while self._exchange.read(deadline):
                        self._received.clear()
                self._exchange.end()
            finally:
                self._lock.release()

    def answer_pings(self) -> None:
        if self._lock.acquire(blocking=False):
            deadline = time.monotonic() + _MOMENT_S
            try:
                with contextlib.suppress(OSError):  # if it is not the deadline's, the user's thread meets it
                    while self._exchange.read(deadline):
                        pass
            finally:
                self._lock.release()


class Streams:
    """The streams of one transport. A thread answers pings for them, and ends those that their users have left."""

    def __init__(self) -> None:
        self.used: set[Reading] = set()
        self._left: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # more than one if several first streams began at once
        weakref.finalize(self, self._left.put, None).atexit = False

    def add(self, reading: Reading) -> None:
        """Look after a stream until it is left, or has ended and is discarded from ``used``."""
        if not self._threads:
            thread = threading.Thread(target=_look_after, args=(self.used, self._left), name="shm streams", daemon=True)
            thread.start()
            self._threads.append(thread)
        self.used.add(reading)

    def leave(self, reading: Reading) -> None:
        """End a stream soon. This neither waits nor locks, so a finalizer may call it. Twice is fine."""
        self._left.put(reading)
        self.used.discard(reading)  # last: close() finds it here, or its thread in the queue

    def close(self) -> None:
        """Leave every stream, and wait until :meth:`.Reading.end` has ended them. Their users get a ClosedError."""
        for reading in list(self.used):
            self.leave(reading)
        self._left.put(None)
        for thread in self._threads:
            thread.join()


def _look_after(used: set[Reading], left: queue.SimpleQueue[Reading | None]) -> None:
    """Answer pings for the used streams, and end the left ones, all at once; return when None comes."""
    ending: list[threading.Thread] = []
    due = 0.0
    while True:
        try:
            reading = left.get(timeout=max(due - time.monotonic(), 0))
        except queue.Empty:
            due = time.monotonic() + _PINGS_S
            for reading in list(used):
                reading.answer_pings()
            reading = None  # this thread must not keep it
            continue
        if reading is None:
            break
        thread = threading.Thread(target=reading.end, name="shm stream drain", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no further thread can start
            reading.end()
        else:
            ending = [each for each in ending if each.is_alive()] + [thread]
        del reading, thread
    left.put(None)  # for the other threads
    for thread in ending:
        thread.join()
