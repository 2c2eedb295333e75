"""What perf_analyzer has measured, the three ways side by side: as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from .cases import Case
from .runs import Figures

__all__ = ["WAYS", "Measured", "table_of"]

WAYS: Final = ("in band", "system", "direct")


@dataclass(frozen=True)
class Measured:
    """One case, and what was measured on each way."""

    case: Case
    in_band: Figures
    system: Figures
    direct: Figures

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return {
            "case": self.case.name,
            "model": self.case.model,
            "shape": list(self.case.shape),
            "input_bytes": self.case.byte_size,
            "in_band": asdict(self.in_band),
            "system": asdict(self.system),
            "direct": asdict(self.direct),
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table."""
        ways = (self.in_band, self.system, self.direct)
        shape = ",".join(map(str, self.case.shape))
        yield self.case.name, "infer/s", *_cells([way.inferences_per_s for way in ways], 0)
        yield f"[{shape}]", "p50 ms", *_cells([way.p50_ms for way in ways], 2)
        yield f"{self.case.byte_size:,} bytes", "p90 ms", *_cells([way.p90_ms for way in ways], 2)
        yield "", "p99 ms", *_cells([way.p99_ms for way in ways], 2)


def table_of(measured: list[Measured], window_ms: int, concurrency: int) -> Table:
    """Lay the figures out; the last columns say how many times as much as on the direct path they are."""
    table = Table(
        title=f"perf_analyzer over gRPC, concurrency {concurrency}, 3 windows of {window_ms} ms",
        title_justify="left",
    )
    table.add_column("request")
    table.add_column("")
    for heading in (*WAYS, "in band\n/ direct", "system\n/ direct"):
        table.add_column(heading, justify="right")
    for each in measured:
        for row in each.rows():
            table.add_row(*row)
        table.add_section()
    return table


def _cells(values: list[float], digits: int) -> list[str]:
    """Return a quantity on each way, and how many times as much as on the last one it is on the others."""
    return [*[f"{value:.{digits}f}" for value in values], *[f"{value / values[-1]:.2f}" for value in values[:-1]]]
