"""Counts by group and name. Clients send theirs as lines of JSON; the soak adds them up."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Tally"]


class Tally:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, Counter[str]] = {}
        self._samples: dict[str, str] = {}

    def add(self, group: str, name: str, count: int = 1) -> None:
        """Count."""
        with self._lock:
            self._groups.setdefault(group, Counter())[name] += count

    def add_error(self, error: BaseException, group: str = "errors") -> None:
        """Count an error by its class and the server's code; keep the first message of each."""
        status = getattr(error, "status", lambda: None)()
        name = type(error).__name__ + (f" {status.removeprefix('StatusCode.')}" if status else "")
        self.add(group, name)
        with self._lock:
            self._samples.setdefault(name, str(error)[:300])

    def group(self, name: str) -> dict[str, int]:
        """Return a group, the largest counts first."""
        with self._lock:
            return dict(self._groups.get(name, Counter()).most_common())

    def total(self, group: str) -> int:
        """Return the sum of a group."""
        return sum(self.group(group).values())

    @property
    def samples(self) -> Mapping[str, str]:
        """The first message of each kind of error."""
        with self._lock:
            return dict(self._samples)

    def take(self) -> str:
        """Return everything as a line of JSON, and begin anew."""
        with self._lock:
            text = json.dumps({"groups": self._groups, "samples": self._samples})
            self._groups = {}
            self._samples = {}
            return text

    def merge(self, text: str) -> None:
        """Add what another tally gave with :meth:`take`."""
        given = json.loads(text)
        for group, counts in given["groups"].items():
            for name, count in counts.items():
                self.add(group, name, count)
        with self._lock:
            self._samples = {**given["samples"], **self._samples}
