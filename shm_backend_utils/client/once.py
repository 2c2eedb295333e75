"""Finding out once what many calls want to know at the same moment."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..errors import ShmError
from .errors import DeadlineExceededError, out_of_time
from .settings import left_until
from .steps import Steps, Wait

__all__ = ["Once"]

T = TypeVar("T")


class Once:
    """Has one call at a time look for something, and all others wait for what it finds. For threads, and for tasks."""

    def __init__(self) -> None:
        self._searches: dict[Hashable, concurrent.futures.Future[tuple[Any, ShmError | None] | None]] = {}

    def find(self, what: Hashable, search: Callable[[], Steps[T]], deadline: float) -> Steps[T]:
        """Return what one call finds that searches for it; ``search`` begins that, by this call's deadline.

        An error is everybody's, too. But where the searching call was cancelled, or had no time left, another one
        searches. So the search looks first whether it was found already.
        """
        while True:
            mine: concurrent.futures.Future[tuple[Any, ShmError | None] | None] = concurrent.futures.Future()
            mine.set_running_or_notify_cancel()  # a task that is cancelled while it waits cancels nobody else's wait
            outcome: tuple[Any, ShmError | None] | None = None
            try:
                theirs = self._searches.setdefault(what, mine)
                if theirs is mine:
                    found = yield from search()
                    outcome = found, None
                    return found
            except ShmError as error:
                if not isinstance(error, DeadlineExceededError):
                    outcome = None, copy.copy(error)  # without its frames, which belong to this call
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
            if outcome is not None:
                found, told = outcome
                if told is not None:
                    raise copy.copy(told)
                return found
