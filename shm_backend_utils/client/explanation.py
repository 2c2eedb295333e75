"""Tables for people: the path that calls take and the reason, and a client's counters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..memory.pool.options import PoolStatus

__all__ = ["Check", "ClientStats", "Explanation", "Tally"]


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a title, and a line for each row; all columns but the last one are as wide as they need to be."""
    cells = [[_in_a_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    lines = [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    ]
    return "\n  ".join([_in_a_line(title), *lines])


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Check:
    """One condition.

    Attributes
    ----------
    name : str
        The question.
    outcome : bool or None
        None if only a request can tell.
    detail : str
        The finding, and the remedy for a fault.
    needed_by : tuple of str
        The paths that are closed if the outcome is False.
    is_temporary : bool
        Whether the outcome is temporary, so that the client checks again at the next call.
    """

    name: str
    outcome: bool | None
    detail: str
    needed_by: tuple[str, ...]
    is_temporary: bool = False

    @property
    def row(self) -> tuple[str, str, str]:
        return self.name, {True: "yes", False: "no", None: "unknown"}[self.outcome], self.detail

    def __str__(self) -> str:
        return "  ".join(self.row)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why calls of a model take their path. Printed, it is a table.

    Attributes
    ----------
    model : str
    path : str or None
        Which path ``path="auto"`` takes; None if all are closed.
    reason : str
        Why no better path is open. For the best path: the checks that only a call can make, if any.
    checks : tuple of Check
    """

    model: str
    path: str | None
    reason: str
    checks: tuple[Check, ...]

    def open(self, path: str) -> bool:
        """Return whether a path has no known obstacle; True also if a check could not be made."""
        return not self.obstacles(path)

    def obstacles(self, path: str) -> list[Check]:
        """Return the checks that failed and so close a path; empty if the path is open."""
        return [check for check in self.checks if check.outcome is False and path in check.needed_by]

    def __repr__(self) -> str:
        way = f"takes the path {self.path}" if self.path else "has no open path"
        title = f"model {self.model!r} {way}: {self.reason}"
        return _table(title, [check.row for check in self.checks])


@dataclass(frozen=True, repr=False)
class ClientStats:
    """Counters of a client since it was created. Printed, they are a table.

    Attributes
    ----------
    requests, failures : int
        Requests that ended, and how many of these raised. A split call counts as several.
    retries : int
        Requests that were sent again, because the first attempt had certainly not started.
    bytes_avoided : int
        Bytes of tensors that lay in shared memory and so did not cross the network.
    paths : mapping of str to int
        Requests with a result, by the path that they took.
    reasons : mapping of str to str
        For each model: its path, and why it takes no better one.
    slot_waits : int
        Calls that had to wait for memory.
    slots_held, slots_idle, quarantined : int
        Slots that calls or arrays hold now; free slots; and slots that wait until a model is done with them.
    pool_bytes, pool_max_bytes : int
        The size of all slots now, and the most that it may be.
    """

    requests: int
    failures: int
    retries: int
    bytes_avoided: int
    paths: Mapping[str, int]
    reasons: Mapping[str, str]
    slot_waits: int
    slots_held: int
    slots_idle: int
    quarantined: int
    pool_bytes: int
    pool_max_bytes: int

    def __repr__(self) -> str:
        rows: list[tuple[str, str]] = []
        for name, value in vars(self).items():
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            rows += [(f"{name} {key}".rstrip(), part if isinstance(part, str) else f"{part:,}") for key, part in parts]
        return _table("what the client has done", rows)


class Tally:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        # The garbage collector may end and count a stream at any time, even while this thread holds the lock.
        self.lock = threading.RLock()
        self.failure_count = 0
        self.retries = 0
        self.bytes_avoided = 0
        self.paths: Counter[str] = Counter()

    def stats(self, reasons: Mapping[str, str], slot_waits: int, pool: PoolStatus) -> ClientStats:
        with self.lock:
            return ClientStats(
                requests=sum(self.paths.values()) + self.failure_count,
                failures=self.failure_count,
                retries=self.retries,
                bytes_avoided=self.bytes_avoided,
                paths=dict(self.paths),
                reasons=reasons,
                slot_waits=slot_waits,
                slots_held=pool.held,
                slots_idle=pool.idle,
                quarantined=pool.quarantined,
                pool_bytes=pool.byte_size,
                pool_max_bytes=pool.max_bytes,
            )

    def after_fork(self) -> None:
        """In a forked child, replace the lock, which another thread of the parent may have held."""
        self.lock = threading.RLock()

    def failed(self) -> None:
        with self.lock:
            self.failure_count += 1

    def succeeded(self, path: str, bytes_avoided: int) -> None:
        with self.lock:
            self.paths[path] += 1
            self.bytes_avoided += bytes_avoided

    def retried(self) -> None:
        with self.lock:
            self.retries += 1
