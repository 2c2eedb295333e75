"""How long strangers may have a session wait: who hangs must not take the time that is everybody's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Patience"]

_COMES_BACK: Final = 0.1
"""Of the time that passes. So long can one user have a session wait in the long run."""

_MOST_USERS: Final = 4
"""That each have a time of their own. With the common one, at most half of a session's time goes."""

_FREE: Final = 0.01
"""Of all of a user's time. A wait no longer than this does not count: a request that costs so little more is one as any
other."""

_FREE_IF_ANSWERED: Final = 0.25
"""The same for a wait that was not in vain. Honest clients on a busy machine take some tens of milliseconds, and many
may come at once: their threads wait for processors, and for their interpreters' locks."""

_LEAST: Final = 0.02
"""Of all of a user's time: less counts as none. It is more than what is free, so that who hangs always pays."""


class Patience:
    """What is left of the time that each user may have a session wait, but for moments.

    Each may take all of it at once, and a tenth of the time that passes comes back. Users beyond the first few whose
    time is not whole share one time with those whom nobody knows.

    Threads that wait at once may together take more than is left; they owe it then, and it comes back later.

    Parameters
    ----------
    bound_s : float
        All of one user's time, in seconds.
    clock : callable
        As ``time.monotonic``.
    """

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound_s = bound_s
        self._clock = clock
        self._lock = threading.Lock()
        self._whole_at: dict[int | None, float] = {}  # when all will have come back, of those who have less

    @contextlib.contextmanager
    def waiting_for(self, user: int | None) -> Iterator[float]:
        """Count the time that the block takes, if any is left; it was in vain if the block raises.

        Parameters
        ----------
        user : int or None
            Whose id; None if that is not known.

        Yields
        ------
        float
            How many seconds the block may wait; 0 if none is left.
        """
        began = self._clock()
        left_s = self._left(user, began)
        if left_s < self._bound_s * _LEAST:
            yield 0.0
            return
        try:
            yield left_s
        except BaseException:
            self._take(user, began, _FREE)
            raise
        self._take(user, began, _FREE_IF_ANSWERED)

    def _left(self, user: int | None, now: float) -> float:
        with self._lock:
            return self._bound_s - max(0.0, self._whole_at.get(self._payer(user, now), now) - now) * _COMES_BACK

    def _take(self, user: int | None, began: float, free: float) -> None:
        now = self._clock()
        if now - began <= self._bound_s * free:
            return
        with self._lock:
            payer = self._payer(user, now)
            self._whole_at[payer] = max(self._whole_at.get(payer, now), now) + (now - began) / _COMES_BACK

    def _payer(self, user: int | None, now: float) -> int | None:
        """Return whose time a user has: his own, or that of those whom nobody knows."""
        self._whole_at = {user: whole_at for user, whole_at in self._whole_at.items() if whole_at > now}
        is_room = len(self._whole_at.keys() - {None}) < _MOST_USERS
        return user if user in self._whole_at or is_room else None
