"""Measure what this library costs, each figure against something else in the same run, next to what it is held to."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from shm_backend_utils.client import CopyWarning
from shm_backend_utils.errors import MachineError

from ..common.command_line import exit_status, positive
from ..common.figures import Figure
from .amounts import FULL, QUICK, Amounts
from .document import document_of
from .figures import as_json, table_of
from .groups import GROUPS
from .machine import describe
from .rounds import Bench, allow_many_descriptors
from .server import bench_server


def main() -> int:
    """Run the bench; return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and all medians to FILE")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write a page of documentation to FILE")
    parser.add_argument(
        "--only", choices=GROUPS, action="append", metavar="GROUP", help=f"measure one of {', '.join(GROUPS)}"
    )
    parser.add_argument("--quick", action="store_true", help="do little: to see whether everything works")
    parser.add_argument("--rounds", type=positive, help=f"how often each case runs (default: {FULL.rounds})")
    parser.add_argument(
        "--requests", type=positive, help=f"how many requests at random to send (default: {FULL.requests:,})"
    )
    parser.add_argument("--functions", action="store_true", help="print the functions that are counted")
    arguments = parser.parse_args()
    amounts = QUICK if arguments.quick else FULL
    if arguments.rounds:
        amounts = amounts.with_rounds(arguments.rounds)
    if arguments.requests:
        amounts = amounts.with_requests(arguments.requests)
    return exit_status(
        lambda: _run(arguments.only or list(GROUPS), amounts, arguments.json, arguments.document, arguments.functions),
        MachineError,
    )


def _run(
    groups: list[str], amounts: Amounts, json_file: Path | None, document: Path | None, shows_functions: bool
) -> int:
    allow_many_descriptors()
    warnings.simplefilter("ignore", CopyWarning)  # what is copied here is what is measured
    figures: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress, bench_server() as server:
        bench = Bench(server, amounts, progress, shows_functions=shows_functions)
        plain = bench.plain_client()
        machine = describe(plain)
        plain.close()
        for group in groups:
            figures += GROUPS[group](bench)
    console = Console()
    console.print(table_of(figures))
    if json_file:
        content = {
            "machine": machine,
            "figures": [as_json(figure) for figure in figures],
            "medians_ms": bench.medians,
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    if document:
        document.write_text(document_of(figures, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
