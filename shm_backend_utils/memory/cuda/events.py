"""Interprocess CUDA events: the client's stream waits for the model's, and no host waits for either."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
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

    def are_done(self, events: Iterable[Event]) -> bool:
        """Return whether what these events stand for is done; raises as :meth:`wait_on_streams`."""
        for event in events:
            opened = self._open(event)
            with device_guard(self._runtime, opened.device):
                if not self._runtime.is_event_done(opened.address):
                    return False
        return True

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
