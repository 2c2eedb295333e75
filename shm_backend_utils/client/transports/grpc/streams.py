"""Streams of answers for threads. Each is read for a moment after its user has left it.

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
from ..connections import Connection, Connections
from ..conversation import MOST_SENDINGS, Unanswered
from .codec import refusal
from .http2 import Http2, Reply, Request

__all__ = ["AHEAD", "DRAIN_S", "ChannelReading", "Http2OfStreams", "Reading", "SocketReading", "Streams"]

AHEAD: Final = 2
"""When one more answer than this waits for the user, grpcio's reader pauses, and so does the server."""
DRAIN_S: Final = 1.0
_PINGS_S: Final = 5.0
"""How often to answer the server's pings while users pause. Triton hangs up after 20 seconds without an answer."""
_MOMENT_S: Final = 1e-3


class Reading(ABC):
    """A call with several answers."""

    @abstractmethod
    def take(self, timeout_s: float) -> Any:
        """Return the next answer, None at the call's end; ClosedError if another thread has ended it."""

    @abstractmethod
    def end(self) -> None:
        """Drop further answers; cancel the call if it has not ended after ``DRAIN_S``. Twice is fine."""

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

    def take(self, timeout_s: float) -> Any:
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


class Http2OfStreams(Http2):
    """As many unread bytes as a socket holds: Triton hangs up if the client's has been full for 20 seconds."""

    window = 2**16 - 1


class SocketReading(Reading):
    """A call over one of the client's own sockets. The user's thread reads it, as waking another one takes longer."""

    def __init__(self, connections: Connections, head: bytes, message: bytes, read: Callable[[bytes], Any]) -> None:
        self._connections = connections
        self._read = read
        self._received: deque[bytes] = deque()
        self._request = Request(head, message, self._received.append)
        self._sendings = 0
        self._connection: Connection | None = None  # while the call is under way
        self._number = 0
        self._lock = threading.Lock()  # one thread reads
        self._is_left = False

    def take(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not (self._received or self._is_left):
                outcome = self._turn(deadline)
                if outcome is not None and not self._is_left and not self._is_to_resend(outcome):
                    return None
            if self._is_left:
                raise ClosedError("this client")
            return self._read(self._received.popleft())

    def end(self) -> None:
        self._is_left = True
        deadline = time.monotonic() + DRAIN_S
        if self._lock.acquire(timeout=DRAIN_S):  # else its user waits for an answer, until the connections are closed
            try:
                with contextlib.suppress(Exception):
                    while self._connection is not None:
                        self._received.clear()
                        self._turn(deadline)
                self._give_back(is_kept=False)
            finally:
                self._lock.release()

    def answer_pings(self) -> None:
        if self._lock.acquire(blocking=False):
            deadline = time.monotonic() + _MOMENT_S
            try:
                with contextlib.suppress(OSError):  # the user will meet it, unless time is up
                    while self._connection is not None and self._number not in self._connection.conversation.ended:
                        self._connection.take_turn(deadline)
            finally:
                self._lock.release()

    def _turn(self, deadline: float) -> Reply | Unanswered | None:
        """Read what comes next; return how the call has ended, once it has."""
        if self._connection is None:
            self._connection, self._number = self._connections.begin(self._request, deadline)
            self._sendings += 1
        connection, conversation = self._connection, self._connection.conversation
        try:
            if self._number not in conversation.ended:
                connection.take_turn(deadline)
                return None
        except OSError as error:
            raise self._connections.failure(error, connection) from None
        outcome: Reply | Unanswered = conversation.ended.pop(self._number)
        self._give_back(is_kept=not self._is_left and conversation.has_room and not conversation.failure)
        return outcome

    def _is_to_resend(self, outcome: Reply | Unanswered) -> bool:
        """Return whether the request certainly has not begun; raise its error, if it has one."""
        if isinstance(outcome, Reply):
            if outcome.status:
                raise refusal(outcome, self._connections.server.address)
            return False
        if outcome.may_have_begun or self._sendings == MOST_SENDINGS:
            raise self._connections.server.unanswered(outcome)
        return True

    def _give_back(self, is_kept: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._connections.end(connection, is_kept)


class Streams:
    """The streams of one connection. A thread ends those that their users have left."""

    def __init__(self) -> None:
        self.used: set[Reading] = set()
        self._left: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._left.put, None).atexit = False

    def begin(self, reading: Reading) -> None:
        """Call :meth:`leave` afterwards, even if this raises."""
        if self._thread is None:
            thread = threading.Thread(
                target=_look_after, args=(self.used, self._left), name="shm stream drain", daemon=True
            )
            thread.start()
            self._thread = thread
        self.used.add(reading)

    def leave(self, reading: Reading) -> None:
        """End a stream soon. This neither waits nor locks, so a finalizer may call it. Twice is fine."""
        self.used.discard(reading)
        self._left.put(reading)

    def close(self) -> None:
        """Leave every stream, and wait until all have ended or were cancelled. Their users get a ClosedError."""
        for reading in list(self.used):
            self.leave(reading)
        self._left.put(None)
        if self._thread is not None:
            self._thread.join()


def _look_after(used: set[Reading], left: queue.SimpleQueue[Reading | None]) -> None:
    """Answer pings for the used streams, and end the left ones, all at once; return when None comes."""
    ending: list[threading.Thread] = []
    while True:
        try:
            reading = left.get(timeout=_PINGS_S)
        except queue.Empty:
            for each in list(used):
                each.answer_pings()
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
    left.put(None)  # for a second thread, if two first streams began at once
    for thread in ending:
        thread.join()
