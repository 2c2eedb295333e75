"""Interprocess CUDA events: the client's stream waits for the model's, and no host waits for either.

A client that must know whether memory is its own again asks, and asks again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ...errors import PeerError, RegionRefusedError
from ...protocol.results import Event
from .memory import device_of
from .runtime import CudaError, CudaRuntime, device_guard

__all__ = ["Event", "EventListener", "EventRecorder"]

_MOST_OPEN: Final = 256


class EventRecorder:
    """Records events, in the process whose work others wait for. For one thread at a time.

    Every stream has one event, which is recorded again and again: who waits late waits for more than it must, and never
    for less.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._events: dict[tuple[int, int], tuple[int, Event]] = {}
        self._process = os.getpid()

    def record(self, device: int) -> Event:
        """Record what is on the thread's current stream of a device now, and return the event."""
        runtime = self._runtime
        with device_guard(runtime, device):
            stream = runtime.stream_address(runtime.current_stream())
            known = self._events.get((device, stream))
            if known is None:
                event = runtime.create_event()
                try:
                    made = Event(runtime.device_uuid(device), runtime.export_event(event))
                except BaseException:
                    runtime.destroy_event(event)
                    raise
                known = self._events[device, stream] = event, made
            runtime.record(known[0], stream)
        return known[1]

    def __del__(self) -> None:
        if self._process == os.getpid():
            for (device, _), (event, _) in self._events.items():
                with contextlib.suppress(CudaError), device_guard(self._runtime, device):
                    self._runtime.destroy_event(event)


class _Opened:
    """An event of another process, open here until nobody refers to it."""

    def __init__(self, runtime: CudaRuntime, event: Event) -> None:
        self._runtime = runtime
        self._process = 0
        self.device = device_of(runtime, event.device_uuid, "the model's event")
        with device_guard(runtime, self.device):
            self.address = runtime.open_event(event.handle)
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a forked child it is not ours
            with contextlib.suppress(CudaError), device_guard(self._runtime, self.device):
                self._runtime.destroy_event(self.address)


class EventListener:
    """Waits for events of other processes. Thread-safe.

    Events stay open, up to a number: models that are loaded anew have others, without end.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._opened: dict[Event, _Opened] = {}  # that which was used last at the end

    def wait_on_streams(self, events: Iterable[Event]) -> None:
        """Let what this thread puts on its current streams from now on wait for these events. The host does not.

        Raises
        ------
        PeerError
            An event is none of this machine's.
        """
        runtime = self._runtime
        for event in events:
            opened = self._open(event)
            with device_guard(runtime, opened.device):
                runtime.wait_for_event(opened.address, runtime.stream_address(runtime.current_stream()))

    @contextlib.contextmanager
    def watching(self, events: Iterable[Event]) -> Iterator[Callable[[], bool]]:
        """Give a function that returns whether that is done what these events stand for now.

        Raises as :meth:`wait_on_streams`. What is not done at the end of the block is not waited for.
        """
        by_device: dict[int, list[_Opened]] = {}
        for event in events:
            opened = self._open(event)
            by_device.setdefault(opened.device, []).append(opened)
        with contextlib.ExitStack() as watches:
            done = [watches.enter_context(self._watching(device, each)) for device, each in by_device.items()]
            yield lambda: all(is_done() for is_done in done)

    @contextlib.contextmanager
    def _watching(self, device: int, events: Sequence[_Opened]) -> Iterator[Callable[[], bool]]:
        # To ask about the model's event would be to ask about its latest recording: while others keep the stream busy,
        # that is never done. So an event of our own comes after what theirs stand for now, and is recorded once. On a
        # stream that waits share, one that takes long would hold up the others.
        runtime = self._runtime
        with contextlib.ExitStack() as ending:
            with device_guard(runtime, device):
                stream = runtime.create_stream()
                ending.callback(self._end, runtime.destroy_stream, device, stream)
                mark = runtime.create_event()
                ending.callback(self._end, runtime.destroy_event, device, mark)
                for each in events:
                    runtime.wait_for_event(each.address, stream)
                runtime.record(mark, stream)

            def is_done() -> bool:
                with device_guard(runtime, device):
                    return runtime.is_event_done(mark)

            yield is_done

    def _end(self, destroy: Callable[[int], None], device: int, address: int) -> None:
        if self._process == os.getpid():  # in a forked child it is not ours
            with contextlib.suppress(CudaError), device_guard(self._runtime, device):
                destroy(address)

    def _open(self, event: Event) -> _Opened:
        with self._lock:
            known = self._opened.pop(event, None)
            if known is None:
                try:
                    known = _Opened(self._runtime, event)
                except (CudaError, RegionRefusedError) as error:
                    raise PeerError(f"the model's CUDA event cannot be waited for: {error}") from None
            self._opened[event] = known
            if len(self._opened) > _MOST_OPEN:
                del self._opened[next(iter(self._opened))]
            return known
