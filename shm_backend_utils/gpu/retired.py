"""GPU memory that this process does not use any more. It is freed or unmapped when its GPU has finished with it.

Often a finalizer drops the last reference, and finalizers must not wait. So they queue the work here, and a thread that
may wait does it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..process import call_after_fork
from .errors import CudaError

if TYPE_CHECKING:
    from .runtime import CudaRuntime

__all__ = ["Retired"]

Work = Callable[[], None]


class _Waiting(NamedTuple):
    """Work to do after a GPU has reached an event."""

    device: int
    event: int
    work: list[Work]


class Retired:
    """Work, such as freeing GPU memory, that waits until the GPUs have finished with the memory. Thread-safe."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: deque[Work] = deque()  # finalizers append to _idle and to _busy without a lock
        self._busy: deque[tuple[int, Work]] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._polled: deque[tuple[Callable[[], bool], Work]] = deque()
        call_after_fork(self)

    def add(self, device: int, work: Work) -> None:
        """Queue work to do after a device has finished its present work. Never waits."""
        self._busy.append((device, work))

    def add_idle(self, work: Work) -> None:
        """Queue work to do soon, on memory that no device uses any more. Never waits."""
        self._idle.append(work)

    def add_when(self, is_done: Callable[[], bool], work: Work) -> None:
        """Queue work to do after ``is_done`` has returned True. Never waits."""
        self._polled.append((is_done, work))

    def collect(self) -> bool:
        """Free and unmap as much as possible now, without waiting. Return whether something is left.

        Memory that CUDA refuses to free or unmap is leaked, because its users are unknown. All memory of a lost device
        is leaked, too. If CUDA cannot answer now, the next call asks again. With a driver older than CUDA 12.5, this
        waits for the devices.

        Finalizers must not call this: CUDA itself may wait for a device before it frees memory there.
        """
        if not self._lock.acquire(blocking=False):
            return True  # another thread is collecting
        try:
            self._mark()
            for _ in range(len(self._waiting)):
                if self._is_reached(self._waiting[0]):
                    self._idle.extend(self._waiting.popleft().work)
                else:
                    self._waiting.rotate(-1)
            for _ in range(len(self._polled)):
                if self._polled[0][0]():
                    self._idle.append(self._polled.popleft()[1])
                else:
                    self._polled.rotate(-1)
            self._do_idle()
        finally:
            self._lock.release()
        return self.is_waiting

    def collect_idle(self) -> None:
        """Do the work from :meth:`add_idle`, or wait until another thread has done it."""
        with self._lock:
            self._do_idle()

    @property
    def is_waiting(self) -> bool:
        """Whether work is left."""
        return bool(self._idle or self._busy or self._waiting or self._polled)

    def after_fork(self) -> None:
        """Forget all work in a forked child: the memory belongs to the parent."""
        self._lock = threading.Lock()
        self._idle.clear()
        self._busy.clear()
        self._waiting.clear()
        self._polled.clear()

    def _do_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(CudaError):
                self._idle.popleft()()

    def _mark(self) -> None:
        """Record an event behind the present work of each device: when the device reaches it, the memory is unused."""
        by_device: dict[int, list[Work]] = {}
        for _ in range(len(self._busy)):
            device, work = self._busy.popleft()
            by_device.setdefault(device, []).append(work)
        for device, works in by_device.items():
            try:
                self._waiting.append(_Waiting(device, self._recorded(device), works))
            except CudaError as error:
                if not error.is_final:  # for example, a stream is being captured into a graph
                    self._busy.extend([(device, each) for each in works])

    def _recorded(self, device: int) -> int:
        runtime = self._runtime
        event = runtime.create_event(device)
        try:
            runtime.record_device(event, device)
        except BaseException:
            runtime.destroy_event(event, device)
            raise
        return event

    def _is_reached(self, waiting: _Waiting) -> bool:
        runtime = self._runtime
        try:
            with runtime.on(waiting.device):
                if not runtime.is_event_done(waiting.event):
                    return False
        except CudaError as error:
            if error.is_final:
                waiting.work.clear()
            return error.is_final
        with contextlib.suppress(CudaError):
            runtime.destroy_event(waiting.event, waiting.device)
        return True
