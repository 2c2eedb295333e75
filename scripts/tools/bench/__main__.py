"""Measure what this library costs, each figure against something else in the same run, next to what it is held to."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..common.command_line import positive
from ..common.figures import Figure
from .figures import as_json, table_of
from .groups import GROUPS
from .rounds import Bench, allow_many_descriptors
from .server import bench_server


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and all medians to FILE")
    parser.add_argument("--only", choices=GROUPS, metavar="GROUP", help=f"measure one of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=positive, default=300, help="how often each case runs (default: 300)")
    arguments = parser.parse_args()
    groups = [arguments.only] if arguments.only else list(GROUPS)
    allow_many_descriptors()
    figures: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress, bench_server() as server:
        bench = Bench(server, arguments.rounds, progress)
        for group in groups:
            figures += GROUPS[group](bench)
    Console().print(table_of(figures))
    if arguments.json:
        report = {"figures": [as_json(figure) for figure in figures], "medians_ms": bench.medians}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
