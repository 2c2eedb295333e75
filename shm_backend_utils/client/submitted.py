"""Calls whose results are fetched later, made by threads of their own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Final

from ..memory.forks import forsake_in_children
from .errors import ForkedError
from .result import Result

__all__ = ["SubmittedCalls"]

_MOST_AT_ONCE: Final = 32


class SubmittedCalls:
    """The calls of one client that were submitted, and have not ended."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "shm submit")
        self._under_way: set[concurrent.futures.Future[Result]] = set()
        forsake_in_children(self)

    def submit(self, call: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Have a thread make a call; raises RuntimeError after :meth:`close`."""
        future = self._threads.submit(call)
        self._under_way.add(future)
        future.add_done_callback(self._has_ended)
        return future

    def close(self) -> None:
        """Cancel those that have not begun, and take no more. Waits for none. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def forsake(self) -> None:
        """Fail what was under way, in a forked child, where nobody else would ever end it."""
        for future in self._under_way:
            concurrent.futures.Future.__init__(future)  # anew: another thread may have held its lock
            future.set_exception(ForkedError("this call"))

    def _has_ended(self, future: concurrent.futures.Future[Result]) -> None:
        self._under_way.discard(future)
