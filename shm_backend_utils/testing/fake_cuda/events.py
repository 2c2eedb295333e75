"""Interprocess events of the fake GPU.

Work on the fake GPU is done when somebody waits for it; but who waits for an event is in another process. So an event
that is recorded has its stream done up to there by a thread, a little later, as a GPU would.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from abc import abstractmethod
from typing import Any, Final

from ...memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime
from .memories import failure
from .stream import FakeStream

__all__ = ["FakeEvents"]

_NAME: Final = "fake-cuda-event"
_HANDLE: Final = re.compile(rb"fake-cuda-event ([0-9]{1,9}) ([0-9]{1,9})\0*")
_BYTE_SIZE: Final = 16
_RECORDED: Final = 0
_DONE: Final = 1
_DELAY_S: Final = 0.02
_PAUSE_S: Final = 0.0005
_PATIENCE_S: Final = 20.0


class _Event:
    """Two counters in shared memory: how often it was recorded, and which recording is done. Owns the descriptor.

    The memory has no name, so that nothing is left of it when its process is killed; others find it by the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.counters = memoryview(mmap.mmap(fd, _BYTE_SIZE)).cast("Q")

    @property
    def handle(self) -> bytes:
        """How other processes find it."""
        return f"{_NAME} {os.getpid()} {self._fd}".encode().ljust(HANDLE_LENGTH, b"\0")

    def wait(self, recorded: int) -> None:
        """Wait until a recording is done."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.counters[_DONE] < recorded:
            if time.monotonic() > deadline:
                raise failure("wait_for_event", "cudaErrorLaunchTimeout")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last that still waits."""
        os.close(self._fd)


class FakeEvents(CudaRuntime):
    """The part of the fake runtime that is about events."""

    log: list[tuple[str, Any]]

    def __init__(self) -> None:
        self._events: dict[int, _Event] = {}

    def create_event(self) -> int:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTE_SIZE)
        return self._add(_Event(fd))

    def export_event(self, event: int) -> bytes:
        return self._event(event, "export_event").handle

    def open_event(self, handle: bytes) -> int:
        found = _HANDLE.fullmatch(handle)
        if found is None:
            raise failure("open_event", "cudaErrorInvalidValue")
        try:
            return self._add(_Event(os.open(f"/proc/{int(found[1])}/fd/{int(found[2])}", os.O_RDWR | os.O_CLOEXEC)))
        except OSError:
            raise failure("open_event", "cudaErrorInvalidResourceHandle") from None

    def destroy_event(self, event: int) -> None:
        self._event(event, "destroy_event").close()
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        counters = self._event(event, "record").counters
        counters[_RECORDED] += 1
        recording = counters[_RECORDED]

        def be_done() -> None:
            counters[_DONE] = max(counters[_DONE], recording)

        queue = self._stream(stream, "record")
        threading.Timer(_DELAY_S, queue.run_to, [queue.put(be_done)]).start()
        self.log.append(("record", stream))

    def wait_for_event(self, event: int, stream: int) -> None:
        found = self._event(event, "wait_for_event")
        recorded = found.counters[_RECORDED]
        self._stream(stream, "wait_for_event").put(lambda: found.wait(recorded))
        self.log.append(("wait_for_event", stream))

    def is_event_done(self, event: int) -> bool:
        counters = self._event(event, "is_event_done").counters
        self.log.append(("is_event_done", event))
        return bool(counters[_DONE] >= counters[_RECORDED])

    @abstractmethod
    def _stream(self, number: int, method: str) -> FakeStream: ...

    def _add(self, event: _Event) -> int:
        number = id(event)
        self._events[number] = event
        return number

    def _event(self, number: int, method: str) -> _Event:
        event = self._events.get(number)
        if event is None:
            raise failure(method, "cudaErrorInvalidResourceHandle")
        return event
