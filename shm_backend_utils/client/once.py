"""Finding out once what many calls want to know at the same moment."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from ..errors import ShmError
from .errors import DeadlineExceededError, out_of_time
from .settings import left_until
from .steps import Steps, Wait

__all__ = ["Once"]

T = TypeVar("T")


class _Outcome(NamedTuple):
    """What one call has found out for all: an answer, or an error."""

    found: Any
    error: ShmError | None = None


class Once:
    """Has one call at a time look for something, and all others wait for what it finds. For threads, and for tasks."""

    def __init__(self) -> None:
        self._searches: dict[Hashable, concurrent.futures.Future[_Outcome | None]] = {}

    def find(self, what: Hashable, search: Callable[[], Steps[T]], deadline: float) -> Steps[T]:
        """Return what one call finds that searches for it.

        An error is everybody's, too. But where the searching call was cancelled, or had no time left, another one
        searches.

        Parameters
        ----------
        what : hashable
            What is looked for.
        search : callable
            Begins the operation that finds it, by this call's deadline. Another call may have found it just before.
        deadline : float
            Until when this call waits for another one's search, by ``time.monotonic()``.
        """
        while True:
            mine: concurrent.futures.Future[_Outcome | None] = concurrent.futures.Future()
            mine.set_running_or_notify_cancel()  # a task that is cancelled while it waits cancels nobody else's wait
            outcome: _Outcome | None = None
            try:
                theirs = self._searches.setdefault(what, mine)
                if theirs is mine:
                    found = yield from search()
                    outcome = _Outcome(found)
                    return found
            except ShmError as error:
                if not isinstance(error, DeadlineExceededError):
                    outcome = _Outcome(None, copy.copy(error))  # without its frames, which belong to this call
                raise
            finally:
                if self._searches.get(what) is mine:
                    try:
                        del self._searches[what]
                    finally:  # whatever interrupts this, nobody waits in vain
                        mine.set_result(outcome)
            try:
                outcome = yield Wait(theirs, left_until(deadline))
            except TimeoutError:
                raise out_of_time("another call was asking the server the same") from None
            if outcome is not None and outcome.error is not None:
                raise copy.copy(outcome.error)
            if outcome is not None:
                return outcome.found  # type: ignore[no-any-return]
