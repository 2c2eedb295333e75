"""Streams of the fake GPU: what is put on one is done when somebody waits for it, and not before.

A GPU would do it at some time in between. That it is done as late as can be makes a forgotten wait visible every time.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

__all__ = ["FakeStream", "FakeStreams"]

_DEFAULT_STREAMS: Final = frozenset({0, 1, 2})
"""``cudaStreamLegacy``, by its two numbers, and ``cudaStreamPerThread``."""


class FakeStream:
    """A stream. As a context manager it is the thread's current stream of its device. Thread-safe.

    Attributes
    ----------
    ptr : int
        Its number, which stands for ``cudaStream_t``.
    device : int
    """

    def __init__(self, streams: FakeStreams, ptr: int, device: int) -> None:
        self.ptr = ptr
        self.device = device
        self._streams = streams
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()
        self._put = 0
        self._done = 0
        self._putting = threading.RLock()
        self._running = threading.RLock()

    def put(self, work: Callable[[], object]) -> int:
        """Put work on the stream. Return its number there."""
        with self._putting:
            self._put += 1
            self._queue.append((self._put, work))
            return self._put

    def wait_for(self, first: FakeStream) -> None:
        """Let all that comes later wait for what is on another stream now."""
        count = first._put
        self.put(lambda: first.run_to(count))

    def synchronize(self) -> None:
        """Do all that was put on the stream, in order. What fails raises here, and is not done again."""
        self._streams.log.append(("synchronize", self.ptr))
        self.drain()

    def drain(self) -> None:
        """Do as :meth:`synchronize`, unseen by the log."""
        self.run_to(self._put)

    def run_to(self, count: int) -> None:
        """Do what was put on the stream up to that number, in order."""
        # Without this look, two streams that wait for each other's past would wait for each other's lock.
        if self._done >= count:
            return
        with self._running:
            while self._queue and self._queue[0][0] <= count:
                number, work = self._queue.popleft()
                try:
                    work()
                finally:
                    self._done = max(self._done, number)

    def __enter__(self) -> FakeStream:
        self._streams.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._streams.leave(self)


class FakeStreams:
    """Every stream of one runtime, and which of them are current.

    Attributes
    ----------
    log : list of (str, object)
        The runtime's.
    """

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log = log
        self._numbers = itertools.count(0x1000, 0x100)
        self._all: dict[int, FakeStream] = {}
        self._destroyed: list[FakeStream] = []
        self._of_thread = _StreamsOfThread()

    def create(self, device: int) -> FakeStream:
        """Make a stream. It lives as long as the runtime: its work is done even if nobody has kept it."""
        stream = FakeStream(self, next(self._numbers), device)
        self._all[stream.ptr] = stream
        return stream

    def destroy(self, stream: FakeStream) -> None:
        """Let a stream be found no more. Its work is still done."""
        self._destroyed.append(self._all.pop(stream.ptr))

    def current(self, device: int) -> FakeStream:
        """Return the thread's current stream of a device, which is its default stream unless another was entered."""
        entered = self._of_thread.entered.get(device)
        return entered[-1] if entered else self._default(device)

    def find(self, number: int, device: int) -> FakeStream | None:
        """Return the stream of a number, where CUDA's numbers for default streams mean this thread's; None if none."""
        return self._default(device) if number in _DEFAULT_STREAMS else self._all.get(number)

    def drain(self) -> None:
        """Do all that is on any stream."""
        for stream in [*self._all.values(), *self._destroyed]:
            stream.drain()

    def enter(self, stream: FakeStream) -> None:
        """Make a stream the thread's current one of its device."""
        self._of_thread.entered.setdefault(stream.device, []).append(stream)

    def leave(self, stream: FakeStream) -> None:
        """Undo :meth:`enter`."""
        self._of_thread.entered[stream.device].pop()

    def _default(self, device: int) -> FakeStream:
        default = self._of_thread.default.get(device)
        if default is None:
            default = self._of_thread.default[device] = self.create(device)
        return default


class _StreamsOfThread(threading.local):
    """What a thread has, by device."""

    def __init__(self) -> None:
        self.default: dict[int, FakeStream] = {}
        self.entered: dict[int, list[FakeStream]] = {}
