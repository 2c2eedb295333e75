"""A thread that does something from time to time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

__all__ = ["Repeater"]


class Repeater:
    """Calls a function again and again, in a thread of its own, until it is stopped.

    Parameters
    ----------
    work : callable
        Returns how many seconds to wait before the next time. Must not raise.
    first_wait_s : float
        How long to wait before the first time.
    name : str
        The thread's.
    """

    def __init__(self, work: Callable[[], float], first_wait_s: float, name: str) -> None:
        self._work = work
        self._first_wait_s = first_wait_s
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an event, finalizers may put into it
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Do the next work now."""
        self._wakes.put(None)

    def stop_some_time(self) -> None:
        """Stop, without waiting for that. Takes no lock, so that finalizers may call it."""
        self._stopped = True
        self._wakes.put(None)

    def stop(self) -> None:
        """Stop, and wait until the thread has ended, unless it is the caller's own. Twice is fine."""
        self.stop_some_time()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_wait_s
        while True:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=wait_s)
            if self._stopped:
                return
            wait_s = self._work()
