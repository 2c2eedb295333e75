"""What registered names stand for now. The server is asked again when anything happened that may have changed it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Final

from ..forks import forsake_in_children
from .object_watch import ObjectWatch
from .registrations import Registration, StatusEndpoint

__all__ = ["MOST_NAMES", "CurrentRegistrations"]

MOST_NAMES: Final = 4_096
"""From so many answers on, all are forgotten."""
_TRY_AGAIN_S: Final = 5.0
_LOG: Final = logging.getLogger(__name__)


class CurrentRegistrations:
    """Answers of a status endpoint, kept while nobody opens or lets go of an object in /dev/shm. Thread-safe.

    A watch takes one of the user's inotify instances. Without it every question goes to the server; the log says so,
    and it is tried for again every few seconds.

    Parameters
    ----------
    endpoint : StatusEndpoint
        Of the server whose shared memory is this machine's. It stays the caller's.
    """

    def __init__(self, endpoint: StatusEndpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._watch: ObjectWatch | None = None
        self._try_again = -math.inf  # by time.monotonic()
        self._is_told = False
        self._answers: dict[str, Registration] = {}
        forsake_in_children(self)

    def forsake(self) -> None:
        """Begin anew in a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()
        self._watch = None
        self._answers = {}

    def find(self, names: Sequence[str]) -> dict[str, Registration]:
        """Return what names stand for now; as :meth:`.StatusEndpoint.find`, which answers what is not known."""
        answers = self._look()
        if all(name in answers for name in names):
            return {name: answers[name] for name in names}
        found = self._endpoint.find(names)
        answers.update(found)  # if something happened meanwhile, the next look drops them, or has dropped all
        return found

    def _look(self) -> dict[str, Registration]:
        """Forget all answers if there is news; return those that hold, to which others may be added."""
        with self._lock:
            if self._watch is None:
                self._watch = self._new_watch()
                if self._watch is None:
                    return {}
            elif not self._watch.has_news() and len(self._answers) < MOST_NAMES:
                return self._answers
            self._answers = {}
            return self._answers

    def forget(self) -> None:
        """Forget all answers."""
        with self._lock:
            self._answers = {}

    def close(self) -> None:
        """Forget all answers, and stop watching. Later questions begin anew."""
        with self._lock:
            if self._watch is not None:
                self._watch.close()
                self._watch = None
            self._answers = {}

    def _new_watch(self) -> ObjectWatch | None:
        now = time.monotonic()
        if now < self._try_again:
            return None
        try:
            return ObjectWatch()
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                _LOG.warning(
                    "nothing tells when something happens in /dev/shm (%s), so every request has the server asked what "
                    "names stand for; see sysctl fs.inotify.max_user_instances",
                    error,
                )
            self._try_again = now + _TRY_AGAIN_S
            return None
