"""The findings of a run, as a table and as JSON, and whether any of them is a failure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .client.tally import MUST_BE_ZERO, Tally

TWO_USERS: Final = "two users"
SMALL_TMPFS: Final = "a small tmpfs"
SERVER_RESTARTS: Final = "server restarts"
MODEL_RELOADS: Final = "model reloads"
WORDS: Final = (
    *("ShmClient", "AsyncShmClient", "gRPC", "HTTP", "infer", "prepare", "submit", "split", "streams", "batches"),
    *("strings", "forward", "compat", "attach", "varying shapes", "parameters", "headers", "overflows", "forks"),
    *("small calls", "tiny switch intervals", "signals at points", "sealed memory", "memory in /dev/shm"),
    *(TWO_USERS, SMALL_TMPFS, SERVER_RESTARTS, MODEL_RELOADS),
)
"""All that a complete run must have done."""


def impossible(has_private_shm: bool) -> dict[str, str]:
    """Return what this machine cannot do, and why."""
    found = {}
    if os.geteuid() != 0:
        found[TWO_USERS] = "this user may not become another one"
    if not has_private_shm:
        found[SMALL_TMPFS] = "a /dev/shm of its own was not permitted, and nobody else's is to be filled"
    return found


@dataclass(frozen=True)
class Report:
    seed: int
    seconds: float
    failures: Mapping[str, int]  # what must be zero
    sections: Mapping[str, Mapping[str, object]]  # what was counted or measured

    @property
    def is_good(self) -> bool:
        return not any(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        whole = {"good": self.is_good, "seed": self.seed, "seconds": round(self.seconds, 1)}
        return {**whole, "failures": self.failures, **self.sections}

    def show(self, console: Console) -> None:
        table = Table("what", "which", "count", title=f"soak: {self.seconds:.0f} s, seed {self.seed}")
        for section, found in self.sections.items():
            for name, value in found.items():
                table.add_row(section, escape(name), escape(_text(value)))
            table.add_section()
        for name, count in self.failures.items():
            table.add_row("must be zero", name, f"[{'red' if count else 'green'}]{count}[/]")
        console.print(table)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def soak_report(seed: int, seconds: float, tally: Tally, cannot: Mapping[str, str]) -> Report:
    groups = tally.groups()
    counted, requests = groups.pop("done", {}), groups.pop("requests", {})
    done = {word: counted.get(word, 0) for word in WORDS}
    left_out = [word for word in WORDS if not done[word] and word not in cannot]
    failures = {name: tally.total(name) for name in MUST_BE_ZERO}
    failures["things that were never done"] = len(left_out) if seconds >= 60 else 0
    requests["all"] = sum(requests.values())
    return Report(seed, seconds, failures, {"requests": requests, "done": done, **groups, "not done here": cannot})
