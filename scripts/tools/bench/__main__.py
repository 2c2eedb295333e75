"""Measure what this library costs, each figure against something else in the same run, next to what it is held to."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from arguments import positive
from bench_client import client_time
from bench_compat import compat
from bench_figures import Figure, table_of
from bench_modes import modes
from bench_other_client import other_client
from bench_own_time import own_time
from bench_path import round_trips
from bench_rounds import Bench
from bench_slots import allow_many_descriptors, slots
from bench_strings import strings
from bench_throughput import throughput
from rich.console import Console
from rich.progress import Progress
from sample_models import copy_sample_models

from shm_backend_utils.server import EmbeddedServer

MODELS: Final = Path(__file__).resolve().parent / "bench_models"
GROUPS: Final[dict[str, Callable[[Bench], list[Figure]]]] = {
    "path": round_trips,
    "own-time": own_time,
    "other-client": other_client,
    "compat": compat,
    "client": client_time,
    "throughput": throughput,
    "slots": slots,
    "modes": modes,
    "strings": strings,
}


@contextmanager
def bench_server() -> Iterator[EmbeddedServer]:
    """Start a server with the sample models and those of the bench."""
    with tempfile.TemporaryDirectory(prefix="shm-backend-utils-bench-") as folder:
        models = copy_sample_models(Path(folder) / "models")
        shutil.copytree(MODELS, models, dirs_exist_ok=True)
        with EmbeddedServer.start(models) as server:
            yield server


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
        report = {"figures": [figure.as_json() for figure in figures], "medians_ms": bench.medians}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
