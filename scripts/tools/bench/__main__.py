"""Measure the cost of this library: each figure against something else in the same run, with its limit."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.terminal import exit_status, positive
from shm_backend_utils.client import CopyWarning
from shm_backend_utils.errors import CallerError, ShmError

from ..figures import Figure
from .bench import FULL, QUICK, Amounts, Bench, allow_many_descriptors, bench_server, describe
from .groups.growth import growth, registered, sealed
from .groups.modes import batches, forwarding, streams
from .groups.own_time import functions, infer_time, own_time
from .groups.round_trips import latency, round_trips
from .groups.stock import compat, infer_beside_stock, other_client, plain_clients
from .groups.throughput import concurrency, throughput, uploads
from .pictures import PICTURES
from .reports import Reports, Run, table_of

GROUPS: Final[Mapping[str, Callable[[Bench], list[Figure]]]] = {
    "path": round_trips,
    "own-time": own_time,
    "client": infer_time,
    "sealed": sealed,
    "stock": infer_beside_stock,
    "plain": plain_clients,
    "throughput": throughput,
    "uploads": uploads,
    "other-client": other_client,
    "compat": compat,
    "batch": batches,
    "forward": forwarding,
    "registered": registered,
    "stream": streams,
    "growth": growth,
    "functions": functions,
    "concurrency": concurrency,
    "latency": latency,
}
"""The groups by the names that ``--only`` knows. Those of the pictures come last: large tensors grow Triton's pools."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and all medians to FILE")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write a page of documentation to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw pictures into DIR, as SVG; the page shows them")
    parser.add_argument(
        "--only", choices=GROUPS, action="append", metavar="GROUP", help=f"measure one of {', '.join(GROUPS)}"
    )
    parser.add_argument("--quick", action="store_true", help="do little: to see whether everything works")
    parser.add_argument("--rounds", type=positive, help=f"how often each case runs (default: {FULL.rounds})")
    parser.add_argument(
        "--requests", type=positive, help=f"how many requests at random to send (default: {FULL.requests:,})"
    )
    arguments = parser.parse_args()
    return exit_status(lambda: _run(arguments), ShmError, InferenceServerException)


def _run(arguments: argparse.Namespace) -> int:
    reports = Reports(arguments.json, arguments.document, arguments.plot)
    if arguments.plot and arguments.only and not set(PICTURES) & set(arguments.only):
        raise CallerError(f"--plot draws {', '.join(PICTURES)}; add one of them with --only, or leave --only out")
    reports.check()
    found = _measured(arguments.only or list(GROUPS), _amounts(arguments))
    Console().print(table_of(found.figures))
    reports.write(found)
    return 0


def _amounts(arguments: argparse.Namespace) -> Amounts:
    amounts = QUICK if arguments.quick else FULL
    if arguments.rounds:
        amounts = replace(amounts, rounds=arguments.rounds, slow_rounds=max(arguments.rounds // 10, 1))
    return replace(amounts, requests=arguments.requests or amounts.requests)


def _measured(groups: list[str], amounts: Amounts) -> Run:
    allow_many_descriptors()
    warnings.simplefilter("ignore", CopyWarning)  # what is copied here is what is measured
    figures: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress, bench_server() as server:
        bench = Bench(server, amounts, progress)
        with bench.plain_client() as plain:
            machine = describe(plain)
        if amounts.largest_bytes != FULL.largest_bytes:
            machine["run"] = "--quick"  # its figures are not to be quoted
        for group in groups:
            figures += GROUPS[group](bench)
    return Run(machine, figures, bench.medians, bench.curves)


if __name__ == "__main__":
    sys.exit(main())
