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
from arguments import positive
from perf_analyzer_cases import CASES, Case
from perf_analyzer_install import VERSION, install_perf_analyzer
from perf_analyzer_region import expected_output, prepared_region
from perf_analyzer_report import WAYS, Measured, table_of
from perf_analyzer_runs import PerfAnalyzerError, Runs
from rich.console import Console
from rich.progress import Progress
from sample_models import copy_sample_models
from signals import Interrupted, raise_on_signals
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import ShmError
from shm_backend_utils.server import EmbeddedServer, install


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
        models = copy_sample_models(scratch / "models")
        server = stack.enter_context(
            EmbeddedServer.start(models, installation=server_installation, log_file=scratch / "server.log")
        )
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
    raise_on_signals()
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            measured = measure(cases, arguments.window_ms, arguments.concurrency, progress)
    except (ShmError, InferenceServerException, PerfAnalyzerError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.number
    Console().print(table_of(measured, arguments.window_ms, arguments.concurrency))
    if arguments.json:
        report = {
            "perf_analyzer": VERSION,
            "window_ms": arguments.window_ms,
            "concurrency": arguments.concurrency,
            "cases": [each.as_json() for each in measured],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
