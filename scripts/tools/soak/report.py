"""The soak's findings, as a table and as JSON, whether any of them must not be, and all that a soak must have done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from shm_backend_utils.errors import SlotInUseError, StaleRequestError
from shm_backend_utils.protocol.refusals import code_in

from .client.process import Tally

COMPLETE_S: Final = 60.0
"""A run of this length does everything that there is."""

_BY_CLIENTS: Final = (
    *("ShmClient", "AsyncShmClient", "gRPC", "HTTP", "infer", "prepare", "submit", "split", "streams", "batches"),
    *("strings", "forward", "compat", "attach", "varying shapes", "parameters", "headers", "overflows", "forks"),
    *("small calls", "tiny switch intervals", "signals at points", "sealed memory", "memory in /dev/shm"),
)
TWO_USERS: Final = "two users"
SMALL_TMPFS: Final = "a small tmpfs"
SERVER_RESTARTS: Final = "server restarts"
MODEL_RELOADS: Final = "model reloads"

_GROUPS: Final = (
    *("paths", "faults", "outcomes", "signals", "errors", "foreign errors", "errors that nobody could catch"),
    *("wrong bytes", "late calls", "forks that failed", "deaths", "deaths of Triton", "refused by the model"),
    *("recoveries", "reloads that failed", "server starts that failed"),
)
WORDS: Final = (*_BY_CLIENTS, TWO_USERS, SMALL_TMPFS, SERVER_RESTARTS, MODEL_RELOADS)


def impossible(has_private_shm: bool) -> dict[str, str]:
    """Return what this machine cannot do, and why."""
    found = {}
    if os.geteuid() != 0:
        found[TWO_USERS] = "this user may not become another one"
    if not has_private_shm:
        found[SMALL_TMPFS] = "a /dev/shm of its own was not permitted, and nobody else's is to be filled"
    return found


def left_out(done: Mapping[str, int], cannot: Mapping[str, str]) -> list[str]:
    """Return the words that were never done, though they could have been."""
    return [word for word in WORDS if not done.get(word) and word not in cannot]


@dataclass(frozen=True)
class Leaks:
    """What was still there when nobody needed it any more."""

    by_clients: dict[str, int]
    by_stubs: list[str]
    segments: list[str]
    server_segments: list[str]
    registrations: list[str]
    memory: dict[str, int]
    descriptors_grown_to: int

    @property
    def count(self) -> int:
        """How many there are."""
        lists = (self.by_stubs, self.segments, self.server_segments, self.registrations, self.memory)
        return sum(self.by_clients.values()) + sum(map(len, lists))


@dataclass(frozen=True)
class SoakReport:
    """What a soak found."""

    seed: int
    seconds: float
    client_count: int
    cannot: Mapping[str, str]
    tally: Tally
    leaks: Leaks
    grown: Mapping[str, int]
    hangs: int
    client_failures: int
    clients_without_a_result: int

    @property
    def done(self) -> dict[str, int]:
        """How often each thing was done that a soak must have done."""
        done = self.tally.group("done")
        return {word: done.get(word, 0) for word in WORDS}

    @property
    def failures(self) -> dict[str, int]:
        """What must be zero."""
        return {
            "wrong bytes": self.tally.total("wrong bytes"),
            "leaks": self.leaks.count,
            "deaths that were not injected": self.tally.total("deaths"),
            "hangs": self.hangs + self.tally.total("late calls") + self.tally.total("forks that failed"),
            "clients that failed to end": self.client_failures,
            "clients without any right result": self.clients_without_a_result,
            "errors that are not the package's": self.tally.total("foreign errors"),
            "errors that nobody could catch": self.tally.total("errors that nobody could catch"),
            "things that were never done": len(left_out(self.done, self.cannot)) if self.seconds >= COMPLETE_S else 0,
        }

    @property
    def is_good(self) -> bool:
        """Whether nothing was found that must not be."""
        return not any(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the whole report."""
        refused = self.tally.group("refused by the model")
        return {
            "good": self.is_good,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "clients": self.client_count,
            "cannot": dict(self.cannot),
            "failures": self.failures,
            "done": self.done,
            "requests": {
                "total": self.tally.total("requests"),
                "per_second": round(self.tally.total("requests") / self.seconds, 1),
                "by": self.tally.group("requests"),
            },
            **{name.replace(" ", "_").lower(): self.tally.group(name) for name in _GROUPS},
            "error_samples": dict(self.tally.samples),
            "stale_refused": sum(count for reason, count in refused.items() if is_stale(reason)),
            "quarantined": {
                "peak": max(map(int, self.tally.group("quarantine while running")), default=0),
                "at_end": self.tally.total("quarantine at the end"),
            },
            "grown_bytes": dict(self.grown),
            "leaks": asdict(self.leaks),
        }

    def show(self, console: Console) -> None:
        """Print the tables."""
        report = self.as_json()
        table = Table("what", "which", "count", title=f"soak: {self.seconds:.0f} s, seed {self.seed}")
        sections = ("requests", "done", "paths", "faults", "outcomes", "errors", "refused_by_the_model", "recoveries")
        for section in (*sections, *_FINDINGS):
            counts = report[section]["by"] if section == "requests" else report[section]
            for name, count in counts.items():
                table.add_row(section.replace("_", " "), name, f"{count:,}")
            table.add_section()
        for name in ("peak", "at_end"):
            table.add_row("quarantined slots", name.replace("_", " "), str(report["quarantined"][name]))
        table.add_row("stale requests refused", "", str(report["stale_refused"]))
        table.add_section()
        for name, count in self.failures.items():
            style = "red" if count else "green"
            table.add_row("must be zero", name, f"[{style}]{count}[/]")
        console.print(table)
        for word, reason in self.cannot.items():
            console.print(f"Not done on this machine: {word}, as {reason}.")
        if self.leaks.count:
            console.print(f"Leaks: {asdict(self.leaks)}")


_FINDINGS: Final = ("wrong_bytes", "late_calls", "forks_that_failed", "deaths", "deaths_of_triton", "foreign_errors")


def is_stale(reason: str) -> bool:
    """Return whether a refusal says that the client had given the request up."""
    return code_in(reason) in (StaleRequestError.code, SlotInUseError.code)
