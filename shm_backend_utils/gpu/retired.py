"""Work of this process on GPU memory that it does not use any more, such as freeing it.

CUDA waits for a device before it frees or unmaps memory there. Often a finalizer drops the last reference, and
finalizers must not wait. So they queue the work here, and a thread that may wait does it. Unless a GPU is full, no work
may synchronize a whole context, or record an event of one: that would end the graph captures of other threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from ..process import call_after_fork
from .errors import CudaError

__all__ = ["Retired"]

Work = Callable[[], None]


class Retired:
    """Work, such as freeing GPU memory, for a thread that may wait for GPUs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: deque[Work] = deque()  # finalizers append to it without a lock
        self._polled: deque[tuple[Callable[[], bool], Work]] = deque()
        call_after_fork(self)

    def add(self, work: Work) -> None:
        """Queue work. Never waits."""
        self._work.append(work)

    def add_when(self, is_done: Callable[[], bool], work: Work) -> None:
        """Queue work, which waits for nothing, to do after ``is_done`` has returned True. Never waits."""
        self._polled.append((is_done, work))

    def poll(self) -> None:
        """Do the work of :meth:`add_when` that is due. Never waits."""
        for each in tuple(self._polled):
            is_done, work = each
            if is_done():
                try:
                    self._polled.remove(each)
                except ValueError:  # another thread does it
                    continue
                work()

    def collect(self) -> bool:
        """Do the work now, unless another thread is doing it. Return whether some may be left.

        It waits for GPUs. Memory that CUDA refuses to free or unmap is leaked, because its users are unknown. So is all
        memory of a lost device.
        """
        self.poll()
        if not self._lock.acquire(blocking=False):
            return True
        try:
            self._do_all()
        finally:
            self._lock.release()
        return self.is_waiting

    def collect_now(self) -> None:
        """Do the work, or wait until another thread has done it."""
        with self._lock:
            self._do_all()

    def collect_soon(self) -> None:
        """Let a new thread do the work, if there is any. Finalizers must not call this: it waits for that thread."""
        if self._work and not self._lock.locked():
            threading.Thread(target=self.collect, name="shm retired memory", daemon=True).start()

    @property
    def is_waiting(self) -> bool:
        """Whether work is left, or being done."""
        return bool(self._work or self._polled or self._lock.locked())

    def after_fork(self) -> None:
        """Forget all work in a forked child: the memory belongs to the parent."""
        self._lock = threading.Lock()
        self._work.clear()
        self._polled.clear()

    def _do_all(self) -> None:
        for _ in range(len(self._work)):  # work may queue itself again
            with contextlib.suppress(CudaError):
                self._work.popleft()()
