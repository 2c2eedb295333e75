"""What a soak found, as a table and as JSON, and whether any of it must not be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from shm_backend_utils.errors import SlotInUseError, StaleRequestError
from shm_backend_utils.protocol.refusals import code_in

from .client.tally import Tally

__all__ = ["Leaks", "SoakReport"]


@dataclass(frozen=True)
class Leaks:
    """What was still there when nobody needed it any more."""

    by_clients: dict[str, int]
    by_stubs: list[str]
    segments: list[str]
    server_segments: list[str]
    descriptors_grown_to: int

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.by_clients.values()) + len(self.by_stubs) + len(self.segments) + len(self.server_segments)


@dataclass(frozen=True)
class SoakReport:
    """What a soak found."""

    seed: int
    seconds: float
    client_count: int
    has_private_shm: bool
    tally: Tally
    leaks: Leaks
    server_deaths: int
    hangs: int
    client_failures: int
    clients_without_a_result: int

    @property
    def failures(self) -> dict[str, int]:
        """What must be zero."""
        return {
            "wrong bytes": self.tally.total("wrong bytes"),
            "leaks": self.leaks.count,
            "unexpected server deaths": self.server_deaths,
            "hangs": self.hangs,
            "clients that failed to end": self.client_failures,
            "clients without any right result": self.clients_without_a_result,
            "errors that are not the package's": self.tally.total("foreign errors"),
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
            "private_shm": self.has_private_shm,
            "failures": self.failures,
            "requests": {"total": self.tally.total("requests"), "by": self.tally.group("requests")},
            "paths": self.tally.group("paths"),
            "faults": self.tally.group("faults"),
            "outcomes": self.tally.group("outcomes"),
            "errors": self.tally.group("errors"),
            "foreign_errors": self.tally.group("foreign errors"),
            "error_samples": dict(self.tally.samples),
            "wrong_bytes": self.tally.group("wrong bytes"),
            "stale_refused": sum(count for reason, count in refused.items() if is_stale(reason)),
            "refused_by_the_model": refused,
            "quarantined": {
                "peak": max(map(int, self.tally.group("quarantine while running")), default=0),
                "at_end": self.tally.total("quarantine at the end"),
            },
            "recoveries": self.tally.group("recoveries after the server was gone"),
            "server_starts_that_failed": self.tally.group("server starts that failed"),
            "leaks": asdict(self.leaks),
        }

    def show(self, console: Console) -> None:
        """Print the tables."""
        report = self.as_json()
        table = Table("what", "which", "count", title=f"soak: {self.seconds:.0f} s, seed {self.seed}")
        for section in ("requests", "paths", "faults", "outcomes", "errors", "refused_by_the_model", "recoveries"):
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
        if not self.has_private_shm:
            console.print("A /dev/shm of its own was not permitted: the soak did not fill it.")


def is_stale(reason: str) -> bool:
    """Return whether a refusal says that the client had given the request up."""
    return code_in(reason) in (StaleRequestError.code, SlotInUseError.code)
