"""The order of GPU work: streams that wait for streams or a whole device, marks to poll, and later work of the host."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from .errors import CudaError
from .runtime import CudaRuntime
from .streams import Named, NamedEvent, NamedStream

__all__ = ["Mark", "OwnStreams", "do_after_all_work", "order_after"]


class OwnStreams:
    """This package's own streams for its copies. They do not synchronize with the default streams."""

    _process = 0

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._made: deque[tuple[int, list[int]]] = deque()
        self._idle: defaultdict[int, deque[int]] = defaultdict(deque)
        self._process = os.getpid()

    def borrow(self, device: int) -> int:
        """Return a stream for the caller's exclusive use until :meth:`give_back`."""
        try:
            return self._idle[device].pop()
        except IndexError:
            made: list[int] = []
            self._made.append((device, made))  # append first, so that an interrupt cannot lose the stream
            made.append(self.runtime.create_stream(device))
            return made[0]

    def give_back(self, stream: int, device: int) -> None:
        """Return a stream to the pool; the next borrower's work follows the work that is still on it."""
        self._idle[device].append(stream)

    @contextlib.contextmanager
    def one(self, device: int) -> Iterator[int]:
        """Borrow a stream for a block, in which the stream's device is current."""
        stream = self.borrow(device)
        try:
            with self.runtime.on(device):
                yield stream
        finally:
            self.give_back(stream, device)

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the streams are the parent's
            destroy, retired = self.runtime.destroy_stream, self.runtime.retired
            for device, streams in self._made:  # no stream is in use: a borrower would keep this object alive
                for stream in streams:
                    retired.add(functools.partial(destroy, stream, device))


def order_after(runtime: CudaRuntime, first: Named, device: int, stream: int) -> None:
    """Make later work on a device's stream wait for a user's streams and events, of any device. The host does not wait.

    Without those, the stream waits for all present work of its device. A driver older than CUDA 12.5 cannot do that, so
    the host waits for the device instead. Stream 2 is the calling thread's default stream.

    CudaError, and nothing waits, if a stream is being captured into a graph, or an event was recorded in a capture.
    Work that waited for either would become part of the graph, and would not run.
    """
    events = [each for each in first if isinstance(each, NamedEvent)]
    streams = [each for each in first if isinstance(each, NamedStream)]
    if streams or not first:
        for event in _recorded(runtime, streams, device):
            with runtime.on(device):
                runtime.wait_for_event(event, stream)
    for each in events:
        with runtime.on(device):
            if not runtime.is_event_done(each.handle):  # this raises CudaError if the event was recorded in a capture
                runtime.wait_for_event(each.handle, stream)


class _Event:
    """An event that is destroyed with this object; streams that already wait for the event go on waiting."""

    _process = 0

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._handles: list[int] = []
        self._process = os.getpid()
        self._handles.append(runtime.create_event(device))

    @property
    def handle(self) -> int:
        return self._handles[0]

    def close(self) -> None:
        while self._handles:
            self._runtime.destroy_event(self._handles.pop(), self._device)

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child, the event is the parent's
            for handle in self._handles:
                self._runtime.retired.add(functools.partial(self._runtime.destroy_event, handle, self._device))


class Mark:
    """A point on a stream that the host polls. Closing the mark does not stop the stream's work."""

    def __init__(self, runtime: CudaRuntime, stream: int, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._event = _Event(runtime, device)
        with runtime.on(device):
            runtime.record(self._event.handle, stream)

    def is_done(self) -> bool:
        """Return whether the stream has reached the mark; CudaError if its work has failed."""
        with self._runtime.on(self._device):
            return self._runtime.is_event_done(self._event.handle)

    def close(self) -> None:
        """Release the event. Twice is fine."""
        with contextlib.suppress(CudaError):
            self._event.close()


def _recorded(runtime: CudaRuntime, streams: Iterable[NamedStream], device: int) -> Iterator[int]:
    """Yield an event behind the present work of each stream or, without streams, of the whole device."""
    for each in streams:
        own = each.device_on(runtime, device)
        with contextlib.closing(_Event(runtime, own)) as event:
            with runtime.on(own):
                if runtime.is_capturing(each.handle):
                    raise CudaError("waiting for a stream", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
                runtime.record(event.handle, each.handle)
            yield event.handle
    if not streams:
        with contextlib.closing(_Event(runtime, device)) as event:
            runtime.record_device(event.handle, device)
            yield event.handle


def do_after_all_work(runtime: CudaRuntime, devices: Iterable[int], work: Callable[[], None]) -> None:
    """Let a thread do work of the host after all present work of this process on devices. Never waits.

    If a device is lost, the thread never does it.
    """
    runtime.retired.add(functools.partial(_wait_and_do, runtime, devices, work))


def _wait_and_do(runtime: CudaRuntime, devices: Iterable[int], work: Callable[[], None]) -> None:
    try:
        for device in devices:
            runtime.wait_beside_captures(device)
    except CudaError as error:
        if not error.is_final:  # for example, there is no memory to wait by
            do_after_all_work(runtime, devices, work)
        return
    work()
