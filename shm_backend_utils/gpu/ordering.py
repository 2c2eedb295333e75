"""The order of GPU work: streams and hosts that wait for streams or a whole device, and later work of the host."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from .errors import CudaError
from .retired import Retired
from .runtime import CudaRuntime
from .streams import Named, NamedStream

__all__ = ["Mark", "OwnStreams", "do_after_all_work", "order_after"]


class OwnStreams:
    """This package's own streams for its copies, and its events. The streams do not wait for the default streams."""

    _process = 0

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._streams = _Handles(runtime.create_stream, runtime.destroy_stream)
        self._events = _Handles(runtime.create_event, runtime.destroy_event)
        self._process = os.getpid()

    def borrow(self, device: int) -> int:
        """Return a stream for the caller's exclusive use until :meth:`give_back`."""
        return self._streams.take(device)

    def give_back(self, stream: int, device: int) -> None:
        """Return a stream to the pool; the next borrower's work follows the work that is still on it."""
        self._streams.idle[device].append(stream)

    def borrow_event(self, device: int) -> int:
        """Return an event for the caller's exclusive use until :meth:`give_back_event`."""
        return self._events.take(device)

    def give_back_event(self, event: int, device: int) -> None:
        """Return an event to the pool, recorded or not. Streams that wait for it go on waiting for that record."""
        self._events.idle[device].append(event)

    @contextlib.contextmanager
    def one(self, device: int) -> Iterator[int]:
        """Borrow a stream for a block, in which the stream's device is current."""
        stream = self.borrow(device)
        try:
            with self.runtime.current(device):
                yield stream
        finally:
            self.give_back(stream, device)

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the streams are the parent's
            for kept in (self._streams, self._events):
                kept.destroy_all(self.runtime.retired)  # none is in use: a borrower would keep this object alive


class _Handles:
    """Streams or events, which are made when none is idle. Thread-safe."""

    def __init__(self, make: Callable[[int], int], destroy: Callable[[int, int], None]) -> None:
        self._make = make
        self._destroy = destroy
        self._made: deque[tuple[int, list[int]]] = deque()
        self.idle: defaultdict[int, deque[int]] = defaultdict(deque)  # by device

    def take(self, device: int) -> int:
        try:
            return self.idle[device].pop()
        except IndexError:
            made: list[int] = []
            self._made.append((device, made))  # append first, so that an interrupt cannot lose the handle
            made.append(self._make(device))
            return made[0]

    def destroy_all(self, retired: Retired) -> None:
        for device, handles in self._made:
            for handle in handles:
                retired.add(functools.partial(self._destroy, handle, device))


def order_after(own: OwnStreams, first: Named, device: int, stream: int) -> None:
    """Make later work on a device's stream wait for a user's streams and events, of any device. The host does not wait.

    Without those, the stream waits for all present work of its device. A driver older than CUDA 12.5 cannot do that, so
    the host waits for the device instead. Stream 2 is the calling thread's default stream.

    CudaError, and nothing more waits, if a stream is being captured into a graph, or an event was recorded in a
    capture. Work that waited for either would become part of the graph, and would not run.
    """
    runtime = own.runtime
    with runtime.current(device):
        for each in first:
            if isinstance(each, NamedStream):
                with contextlib.closing(Mark.on_named(own, each, device)) as mark:
                    runtime.wait_for_event(mark.event, stream)
            elif not runtime.is_event_done(each.handle):  # CudaError if the event was recorded in a capture
                runtime.wait_for_event(each.handle, stream)
        if not first:
            with contextlib.closing(Mark(own, None, device)) as mark:
                runtime.wait_for_event(mark.event, stream)


class Mark:
    """A point on a stream, or without one in all work of a device. Closing the mark does not stop the work."""

    def __init__(self, own: OwnStreams, stream: int | None, device: int) -> None:
        self._own = own
        self._device = device
        self._events: list[int] = []
        self._events.append(own.borrow_event(device))
        with own.runtime.current(device):
            if stream is None:
                own.runtime.record_device(self.event, device)
            else:
                own.runtime.record(self.event, stream)

    @classmethod
    def on_named(cls, own: OwnStreams, named: NamedStream, device: int) -> Mark:
        """Return a mark on a user's stream; CudaError if the stream is being captured into a graph.

        The legacy default stream and the per-thread one are those of ``device``, unless the user named another device.
        """
        device = named.device_on(own.runtime, device)
        with own.runtime.current(device):
            if own.runtime.is_capturing(named.handle):
                raise CudaError("waiting for a stream", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
            return cls(own, named.handle, device)

    @property
    def event(self) -> int:
        """The event that was recorded at the mark."""
        return self._events[0]

    def is_done(self) -> bool:
        """Return whether the work before the mark is done; CudaError if it has failed."""
        with self._own.runtime.current(self._device):
            return self._own.runtime.is_event_done(self.event)

    def wait(self) -> None:
        """Wait, asleep, until the work before the mark is done; CudaError if it has failed."""
        with self._own.runtime.current(self._device):
            self._own.runtime.synchronize_event(self.event)

    def close(self) -> None:
        """Return the event to its pool. Twice is fine."""
        while self._events:
            self._own.give_back_event(self._events.pop(), self._device)

    def __del__(self) -> None:
        self.close()


def do_after_all_work(runtime: CudaRuntime, devices: Iterable[int], work: Callable[[], None]) -> None:
    """Let a thread do work of the host after all present work of this process on devices. Never waits.

    If the wait fails, the thread never does it, but it waits again after a graph capture.
    """
    runtime.retired.add(functools.partial(_wait_and_do, runtime, devices, work))


def _wait_and_do(runtime: CudaRuntime, devices: Iterable[int], work: Callable[[], None]) -> None:
    try:
        for device in devices:
            runtime.wait_beside_captures(device)
    except CudaError as error:
        if error.is_capture:
            do_after_all_work(runtime, devices, work)
        return
    work()
