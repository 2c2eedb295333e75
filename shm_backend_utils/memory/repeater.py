"""A thread that calls a function from time to time."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Repeater"]

_LOG: Final = logging.getLogger(__name__)
_AFTER_AN_ERROR_S: Final = 1.0


class Repeater:
    """Calls ``work`` again and again, in a thread of its own; ``work`` returns the seconds until the next call."""

    def __init__(self, work: Callable[[], float], first_wait_s: float, name: str) -> None:
        self._goes_on: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike an event, finalizers may put into it
        given = work, first_wait_s, self._goes_on
        self._thread = threading.Thread(target=_repeat, args=given, name=name, daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Make the next call now."""
        self._goes_on.put(True)

    def stop_some_time(self) -> None:
        """Stop soon, and return at once. Takes no lock, so that finalizers may call it."""
        self._goes_on.put(False)

    def stop(self, patience_s: float | None = None) -> None:
        """Stop, and wait for the thread's end, up to ``patience_s``, unless it is the caller's own. Twice is fine."""
        self.stop_some_time()
        if self._thread is not threading.current_thread():
            self._thread.join(patience_s)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            self.stop_some_time()


def _repeat(work: Callable[[], float], wait_s: float, goes_on: queue.SimpleQueue[bool]) -> None:
    is_last = False
    while not is_last:
        is_hurried = False
        try:
            while goes_on.get(timeout=0 if is_hurried else wait_s):
                is_hurried = True  # several calls of hurry() count as one
            if not is_hurried:
                return
            is_last = True
        except queue.Empty:
            pass
        try:
            wait_s = work()
        except Exception:
            _LOG.exception("a call in the thread %r failed; the thread goes on", threading.current_thread().name)
            wait_s = max(wait_s, _AFTER_AN_ERROR_S)
