"""The counts of a run, and what must not be counted at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

WRONG: Final = "wrong bytes"
LEAKS: Final = "leaks"
DEATHS: Final = "deaths that were not injected"
HANGS: Final = "hangs"
FAILED_CLIENTS: Final = "clients that failed to end"
UNLUCKY_CLIENTS: Final = "clients without any right result"
FOREIGN_ERRORS: Final = "errors that are not the package's"
UNCAUGHT_ERRORS: Final = "errors that nobody could catch"
MUST_BE_ZERO: Final = (
    *(WRONG, LEAKS, DEATHS, HANGS, FAILED_CLIENTS, UNLUCKY_CLIENTS, FOREIGN_ERRORS, UNCAUGHT_ERRORS),
)


class Tally:
    """Counts by group and name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[str, Counter[str]] = {}
        self._messages: dict[str, str] = {}

    def add(self, group: str, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._groups.setdefault(group, Counter())[name] += count

    def add_error(self, error: BaseException, group: str = "errors") -> None:
        """Count an error by its class and the server's code; keep the first message of each."""
        status = getattr(error, "status", lambda: None)()
        name = type(error).__name__ + (f" {status.removeprefix('StatusCode.')}" if status else "")
        self.add(group, name)
        with self._lock:
            self._messages.setdefault(name, str(error)[:300])

    def total(self, group: str) -> int:
        with self._lock:
            return sum(self._groups.get(group, Counter()).values())

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return all groups, the largest counts first, and the first message of each kind of error."""
        with self._lock:
            groups = {name: dict(counts.most_common()) for name, counts in self._groups.items()}
            return {**groups, "messages": dict(self._messages)}

    def take(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            groups, self._groups, self._messages = self.groups(), {}, {}
        return groups

    def merge(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        with self._lock:
            for group, counts in groups.items():
                for name, count in counts.items():
                    if group == "messages":
                        self._messages.setdefault(name, count)
                    else:
                        self.add(group, name, count)
