"""Have perf_analyzer measure sample models: tensors in band, in Triton's own shared memory, and on the direct path."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from rich.console import Console
from rich.progress import Progress
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.common.command_line import exit_status, positive
from shm_backend_utils.cli.common.server import temporary_server
from shm_backend_utils.errors import ShmError
from shm_backend_utils.server import install

from .cases import CASES, Case
from .install import VERSION, install_perf_analyzer
from .region import expected_output, prepared_region
from .report import WAYS, Measured, table_of
from .runs import PerfAnalyzerError, Runs


def measure(cases: list[Case], window_ms: int, concurrency: int, progress: Progress) -> list[Measured]:
    """Start a server, and measure the cases one after another."""
    task = progress.add_task("installing perf_analyzer", total=len(WAYS) * len(cases))
    server_installation = install()
    analyzer = install_perf_analyzer(server_installation)
    with contextlib.ExitStack() as stack:
        progress.update(task, description="waiting for another run to end")
        stack.enter_context(analyzer.alone())
        progress.update(task, description="starting the server")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shm-backend-utils-perf-analyzer-")))
        server = stack.enter_context(temporary_server("perf-analyzer", installation=server_installation))
        client = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        runs = Runs(analyzer, server.grpc_url, window_ms, concurrency, scratch)
        measured = []
        for case in cases:
            progress.update(task, description=case.name)
            measured.append(measure_case(case, runs, client, lambda: progress.advance(task)))
        return measured


def measure_case(case: Case, runs: Runs, client: Any, on_way_done: Callable[[], None]) -> Measured:
    """Measure one case on all ways."""
    expected = expected_output(client, case)
    in_band = runs.in_band(case)
    on_way_done()
    system = runs.system(case, expected.nbytes)
    on_way_done()
    # Not earlier: with shared memory of its own, perf_analyzer unregisters everybody's.
    with prepared_region(client, case, expected) as region:
        direct = runs.direct(case, region)
    on_way_done()
    return Measured(case, in_band, system, direct)


def run(cases: list[Case], window_ms: int, concurrency: int, file: Path | None) -> int:
    """Measure the cases, and print the figures; write them to a file, too, if there is one."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        measured = measure(cases, window_ms, concurrency, progress)
    Console().print(table_of(measured, window_ms, concurrency))
    if file:
        report = {
            "perf_analyzer": VERSION,
            "window_ms": window_ms,
            "concurrency": concurrency,
            "cases": [each.as_json() for each in measured],
        }
        file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/perf_analyzer", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--only", choices=CASES, metavar="CASE", help=f"measure one of {', '.join(CASES)}")
    parser.add_argument(
        "--window-ms",
        type=positive,
        default=2000,
        metavar="N",
        help="how long each of the three windows lasts that are measured (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=1,
        metavar="N",
        help="how many requests are on their way at any time, all with the same memory (default: %(default)s)",
    )
    arguments = parser.parse_args()
    cases = [CASES[arguments.only]] if arguments.only else list(CASES.values())
    return exit_status(
        lambda: run(cases, arguments.window_ms, arguments.concurrency, arguments.json),
        ShmError,
        InferenceServerException,
        PerfAnalyzerError,
    )


if __name__ == "__main__":
    sys.exit(main())
