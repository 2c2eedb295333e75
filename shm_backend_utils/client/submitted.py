"""Calls whose results are fetched later, made by threads of their own."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Final

from ..errors import ClosedError
from ..forks import forsake_in_children
from ..memory.repeater import Repeater
from .errors import ForkedError, out_of_time
from .result import Result

__all__ = ["SubmittedCalls"]

_MOST_AT_ONCE: Final = 32
_ROUND_S: Final = 0.1

Submitted = concurrent.futures.Future[Result]


class SubmittedCalls:
    """The calls of one client that were submitted, and have not ended. Thread-safe.

    Those for which there is no thread wait, but not beyond their deadline.
    """

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "shm submit")
        self._lock = threading.Lock()
        self._under_way: set[Submitted] = set()
        self._with_threads: set[Submitted] = set()  # until their callbacks have returned, which may take as they like
        self._waiting: dict[Submitted, float] = {}  # for a thread, until a moment; who takes one out, ends it
        self._watch: Repeater | None = None
        forsake_in_children(self)

    def submit(self, call: Callable[[], Result], deadline: float) -> Submitted:
        """Have a thread make a call, if one begins with it in time; raises ClosedError after :meth:`close`."""
        future = Submitted()
        try:
            self._waiting[future] = deadline
            self._with_threads.add(future)
            self._under_way.add(future)
            future.add_done_callback(self._under_way.discard)
            try:
                self._threads.submit(self._make, call, future)
            except RuntimeError:
                raise ClosedError("this client") from None
        except BaseException:
            self._waiting.pop(future, None)
            self._with_threads.discard(future)
            self._under_way.discard(future)
            raise
        if len(self._with_threads) > _MOST_AT_ONCE:
            self._watch_the_waiting()
        return future

    def close(self) -> None:
        """Cancel those that have not begun, and take no more. Waits for none. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for future in list(self._waiting):
            if self._waiting.pop(future, None) is not None and future.cancel():
                future.set_running_or_notify_cancel()

    def forsake(self) -> None:
        """Fail what was under way, in a forked child, where nobody else would ever end it."""
        for future in self._under_way:
            concurrent.futures.Future.__init__(future)  # anew: another thread may have held its lock
            future.set_exception(ForkedError("this call"))

    def _make(self, call: Callable[[], Result], future: Submitted) -> None:
        try:
            self._answer(call, future)
        finally:
            self._with_threads.discard(future)

    def _answer(self, call: Callable[[], Result], future: Submitted) -> None:
        if self._waiting.pop(future, None) is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
            del call, future  # whoever keeps the error keeps this frame
        else:
            future.set_result(result)

    def _watch_the_waiting(self) -> None:
        with self._lock:
            if self._watch is None:
                self._watch = Repeater(self._end_the_late, _ROUND_S, "shm submit deadlines")

    def _end_the_late(self) -> float:
        now = time.monotonic()
        for future, deadline in list(self._waiting.items()):
            if now > deadline and self._waiting.pop(future, None) is not None and future.set_running_or_notify_cancel():
                future.set_exception(out_of_time("it waited for a thread"))
        with self._lock:
            if not self._waiting and self._watch is not None:
                self._watch.stop_some_time()
                self._watch = None
        return _ROUND_S
