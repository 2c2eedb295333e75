"""A search whose result many calls need: one call searches, and the others wait for the result."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..errors import ShmError
from .errors import DeadlineExceededError, out_of_time
from .steps import Steps, Wait

__all__ = ["Once"]

T = TypeVar("T")

_Outcome = tuple[Any, ShmError | None]
"""The outcome of one call's search, for all calls that wait: a value, or an error."""
_Searches = dict[Hashable, "_Over"]


class _Over(concurrent.futures.Future["_Outcome | None"]):
    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.set_running_or_notify_cancel()  # else one cancelled task would cancel the future for all


class _Search:
    """One call's search, for which others wait; the end of that call, even by an interrupt, ends the search."""

    def __init__(self, searches: _Searches, what: Hashable) -> None:
        self._searches, self._what = searches, what
        self.over = _Over()

    def end(self, outcome: _Outcome | None = None) -> None:
        """Give the outcome to the waiting calls; a second end does nothing."""
        if not self.over.done():
            self.over.set_result(outcome)
        if self._searches.get(self._what) is self.over:
            del self._searches[self._what]

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupt came before __init__ had ended
            self.end()


class Once:
    """Lets one call at a time search for a value; all other calls wait for its result. For threads and for tasks."""

    def __init__(self) -> None:
        self._searches: _Searches = {}

    def find(self, what: Hashable, search: Callable[[], Steps[T]], deadline: float) -> Steps[T]:
        """Return the result of ``search``, or raise its error; if this call ends early, another one searches."""
        while True:
            mine = _Search(self._searches, what)
            outcome: _Outcome | None = None
            try:
                theirs = self._searches.setdefault(what, mine.over)
                if theirs is mine.over:
                    found = yield from search()
                    outcome = found, None
                    return found
            except ShmError as error:
                if not isinstance(error, DeadlineExceededError):
                    outcome = None, copy.copy(error)  # a copy lacks the traceback, whose frames belong to this call
                raise
            finally:
                mine.end(outcome)
            try:
                outcome = yield Wait(theirs, deadline, theirs.thread)
            except TimeoutError:
                raise out_of_time("another call was asking the server the same") from None
            if outcome is not None:
                found, failure = outcome
                if failure is not None:
                    raise copy.copy(failure)
                return found
            if not theirs.done():  # this call runs in a signal handler, which interrupts the search
                return (yield from search())
