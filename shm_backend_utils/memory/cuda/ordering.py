"""Work of GPUs put in order: streams that wait for streams or for a whole device, and marks for a host to look at."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from .errors import CudaError
from .runtime import CudaRuntime
from .streams import Named, NamedEvent, NamedStream

__all__ = ["Mark", "OwnStreams", "order_after"]


class OwnStreams:
    """Streams of this package's own, for its copies. They and the default streams do not wait for each other.

    Thread-safe. There are as many of a device as were in use at once. They go with this object.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self._process = os.getpid()
        self._idle: defaultdict[int, deque[int]] = defaultdict(deque)

    def borrow(self, device: int) -> int:
        """Return a stream that nobody else uses until it is given back."""
        try:
            return self._idle[device].pop()
        except IndexError:
            return self.runtime.create_stream(device)

    def give_back(self, stream: int, device: int) -> None:
        """Let others use a stream, behind what is still to be done there."""
        self._idle[device].append(stream)

    @contextlib.contextmanager
    def one(self, device: int) -> Iterator[int]:
        """Borrow a stream for a block, with its device current."""
        stream = self.borrow(device)
        try:
            with self.runtime.on(device):
                yield stream
        finally:
            self.give_back(stream, device)

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child they are not ours
            destroy, retired = self.runtime.destroy_stream, self.runtime.retired
            for device, streams in self._idle.items():
                for stream in streams:
                    retired.add_idle(functools.partial(destroy, stream, device))


def order_after(runtime: CudaRuntime, first: Named, device: int, stream: int) -> None:
    """Let all that comes later on a stream wait for what a user has named. No host waits.

    Parameters
    ----------
    runtime : CudaRuntime
        This process'.
    first : sequence of NamedStream and NamedEvent
        Of any device; if it is empty, all that ``device`` has to do now comes first.
    device : int
        Whose default streams are meant, and whose ``stream`` is.
    stream : int
        What waits.

    Raises
    ------
    CudaError
        A stream is being captured into a graph, or an event was recorded there: what waits for these would be captured,
        too, and not be done. Nothing waits then.

    Notes
    -----
    A driver before CUDA 12.5 cannot let a stream wait for a device; then the host waits, here. Stream 2 is the calling
    thread's own.
    """
    events = [each for each in first if isinstance(each, NamedEvent)]
    streams = [each for each in first if isinstance(each, NamedStream)]
    if streams or not first:
        for event in _recorded(runtime, streams, device):
            with runtime.on(device):
                runtime.wait_for_event(event, stream)
    for each in events:
        with runtime.on(device):
            if not runtime.is_event_done(each.handle):  # that fails where it was recorded in a capture
                runtime.wait_for_event(each.handle, stream)


class Mark:
    """All that is on a stream now, to be looked at later. To be closed; what it stands for goes on then.

    Parameters
    ----------
    runtime : CudaRuntime
    stream, device : int
    """

    def __init__(self, runtime: CudaRuntime, stream: int, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._event = runtime.create_event(device)
        try:
            with runtime.on(device):
                runtime.record(self._event, stream)
        except BaseException:
            self.close()
            raise

    def is_done(self) -> bool:
        """Return whether it is done; CudaError if it has failed."""
        with self._runtime.on(self._device):
            return self._runtime.is_event_done(self._event)

    def wait(self) -> None:
        """Wait until it is done, without a bound; CudaError if it has failed."""
        with self._runtime.on(self._device):
            self._runtime.synchronize_event(self._event)

    def close(self) -> None:
        """Let go of the event. Twice is fine."""
        event, self._event = self._event, 0
        if event:
            with contextlib.suppress(CudaError):
                self._runtime.destroy_event(event, self._device)

    def __enter__(self) -> Mark:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _recorded(runtime: CudaRuntime, streams: Iterable[NamedStream], device: int) -> Iterator[int]:
    """Yield events that stand for what is on these streams now, or, of none, for all that a device has to do."""
    for each in streams:
        own = each.device_on(runtime, device)
        with _event(runtime, own) as event:
            with runtime.on(own):
                if runtime.is_capturing(each.handle):
                    raise CudaError("waiting for a stream", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
                runtime.record(event, each.handle)
            yield event
    if not streams:
        with _event(runtime, device) as event:
            runtime.record_device(event, device)
            yield event


@contextlib.contextmanager
def _event(runtime: CudaRuntime, device: int) -> Iterator[int]:
    event = runtime.create_event(device)
    try:
        yield event
    finally:
        runtime.destroy_event(event, device)  # CUDA keeps what a stream still waits for
