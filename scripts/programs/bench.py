"""Measure what the direct path costs, each figure as a ratio of medians in one run, next to what it is held to."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http
from cores import models_on_a_core_of_their_own
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shm_backend_utils.client import PreparedCall, ShmClient
from shm_backend_utils.descriptor import Descriptor, SystemRegionClaim
from shm_backend_utils.model.direct import DirectPlan, DirectTensors
from shm_backend_utils.model.manager import SharedMemoryManager
from shm_backend_utils.model.regions import Resolver
from shm_backend_utils.model.settings import Settings
from shm_backend_utils.region.managed import ManagedRegion
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.spec import ModelSpec

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = (ROOT / "model_repository", Path(__file__).resolve().parent / "bench_models")
IDENTITY_BYTES: Final = {"64 B": 64, "1 MiB": 2**20, "128 MiB": 2**27, "1 GiB": 2**30}
BATCH: Final = (16, 3, 224, 224)
OWN_TIME_LIMITS_US: Final = {1: 20.0, 8: 50.0}
WARM_UP_ROUNDS: Final = 20


@dataclass(frozen=True)
class Row:
    """One figure: a ratio of medians, or a time, and the most that it may be."""

    name: str
    figure: float
    unit: str
    limit: float
    basis: str

    @property
    def holds(self) -> bool:
        """Whether the figure is within its limit."""
        return self.figure <= self.limit


class Medians(dict[str, float]):
    """Median time of each case, in milliseconds."""


def measure(cases: dict[str, Callable[[], object]], rounds: int, tick: Callable[[], None]) -> Medians:
    """Run every case once per round, so that whatever the machine does meanwhile hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(WARM_UP_ROUNDS + rounds):
        for name, case in cases.items():
            begin = time.perf_counter()
            case()
            if round_number >= WARM_UP_ROUNDS:
                times[name].append((time.perf_counter() - begin) * 1e3)
        tick()
    return Medians({name: statistics.median(values) for name, values in times.items()})


def bare_request(stack: ExitStack, protocol: str, server: EmbeddedServer, model: str) -> Callable[[], object]:
    """Return a request of tritonclient, to a model without this library, that carries nothing."""
    module: Any = {"grpc": tritonclient.grpc, "http": tritonclient.http}[protocol]
    url = {"grpc": server.grpc_url, "http": server.http_url}[protocol]
    client = module.InferenceServerClient(url)
    stack.callback(client.close)
    return lambda: client.infer(model, [])


def prepared(stack: ExitStack, client: ShmClient, model: str, shape: tuple[int, ...]) -> PreparedCall:
    """Return a call whose input was filled in place."""
    call = stack.enter_context(client.prepare(model, {"INPUT0": (shape, np.float32)}))
    call.inputs["INPUT0"][:] = 1
    return call


def of_protocol(
    protocol: str, server: EmbeddedServer, rounds: int, tick: Callable[[], None]
) -> tuple[list[Row], Medians]:
    """Measure round trips over one protocol."""
    url = {"grpc": server.grpc_url, "http": f"http://{server.http_url}"}[protocol]
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(url))
        cases: dict[str, Callable[[], object]] = {
            "empty": bare_request(stack, protocol, server, "empty"),
            "bare multiply": bare_request(stack, protocol, server, "bare_multiply"),
        }
        for size, nbytes in IDENTITY_BYTES.items():
            cases[f"identity {size}"] = prepared(stack, client, "identity", (nbytes // 4,)).infer
        multiply = prepared(stack, client, "multiply", BATCH)
        x, y = multiply.inputs["INPUT0"], multiply.infer()["OUTPUT0"]
        cases["multiply"] = multiply.infer
        cases["the multiply alone"] = lambda: np.multiply(x, 2, out=y)  # the same work on the same memory
        medians = measure(cases, rounds, tick)
    rows = [
        Row(
            f"{protocol}: identity of {size}, in place",
            medians[f"identity {size}"] / medians["empty"],
            "× an empty request",
            1.2,
            f"{medians[f'identity {size}']:.3f} ms / {medians['empty']:.3f} ms",
        )
        for size in IDENTITY_BYTES
    ]
    # The sum takes for granted that a processor wakes up as fast after a longer wait.
    # The second floor does not: there, a model multiplies memory of its own.
    floors = {
        "× (the multiply alone + an empty request)": medians["the multiply alone"] + medians["empty"],
        "× an empty request that multiplies": medians["bare multiply"],
    }
    for unit, floor in floors.items():
        basis = f"{medians['multiply']:.3f} ms / {floor:.3f} ms"
        rows.append(
            Row(f"{protocol}: multiply {list(BATCH)}, in place", medians["multiply"] / floor, unit, 1.15, basis)
        )
    return rows, medians


def own_times(server: EmbeddedServer, where: str, rounds: int, tick: Callable[[], None]) -> list[Row]:
    """Measure the library's own time in `execute`: that of a model with it, less that of a model without.

    Between two requests the caches are filled with the code of whatever else runs on the core, so it matters where.
    """
    rows = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(server.grpc_url))
        bare = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        stack.callback(bare.close)
        for tensor_count, limit_us in OWN_TIME_LIMITS_US.items():
            inputs = {f"X{index}": ((1,), np.int64) for index in range(tensor_count)}
            call = stack.enter_context(
                client.prepare("own_time", inputs, outputs=[f"Y{i}" for i in range(tensor_count)])
            )
            whole_us = []
            for _ in range(WARM_UP_ROUNDS + rounds):
                bare.infer("bare_time", [], parameters={"x": 1})
                with call.infer() as result:
                    whole_us.append(int(result["Y0"][0]) / 1e3)
                tick()
            ask = tritonclient.grpc.InferInput("ASK", [1], "INT64")
            ask.set_data_from_numpy(np.zeros(1, np.int64))
            bare_us = bare.infer("bare_time", [ask]).as_numpy("TIMES_NS") / 1e3
            whole, without = statistics.median(whole_us[WARM_UP_ROUNDS:]), float(np.median(bare_us[WARM_UP_ROUNDS:]))
            name = f"own time in execute, {tensor_count} in and {tensor_count} out, {where}"
            rows.append(Row(name, whole - without, "µs", limit_us, f"{whole:.1f} µs - {without:.1f} µs"))
    return rows


def fencing(rounds: int, tick: Callable[[], None]) -> Row:
    """Measure what a request pays for being safe: checking region and generation, the lease both ways."""
    spec = ModelSpec.from_config({"name": "bench", "parameters": {"SHM_PATHS": {"string_value": "direct"}}})
    manager = SharedMemoryManager()
    region = ManagedRegion.create(4096)
    try:
        claim = SystemRegionClaim(region.segment.key, region.header.byte_size, region.header.token.hex(), 0)
        resolved = Resolver(Settings(), manager).resolve(claim, "regions[0]")
        plan = DirectPlan(Descriptor("bench", (claim,), {}, {}), spec, [resolved])
        times_us = []
        for generation in range(1, WARM_UP_ROUNDS + rounds + 1):
            region.record(0).generation = generation
            begin = time.perf_counter()
            plan.check()
            manager.begin_use(plan.mapped)
            DirectTensors(plan, generation).fail()
            manager.end_use(plan.mapped)
            times_us.append((time.perf_counter() - begin) * 1e6)
            tick()
    finally:
        manager.unregister_all()
        region.segment.unlink()
        region.close()
    return Row("fencing, leases and checks of one request", statistics.median(times_us), "µs", 10.0, "in a loop")


@contextmanager
def bench_server() -> Iterator[EmbeddedServer]:
    """Start a server with the sample models and those of the bench."""
    with tempfile.TemporaryDirectory() as folder:
        for models in MODELS:
            shutil.copytree(models, Path(folder) / "models", dirs_exist_ok=True)
        with EmbeddedServer.start(Path(folder) / "models") as server:
            yield server


def show(console: Console, rows: list[Row]) -> None:
    """Print the table."""
    table = Table("figure", "measured", "at most", "unit", "medians")
    for row in rows:
        style = "green" if row.holds else "red"
        table.add_row(row.name, f"[{style}]{row.figure:.2f}[/]", f"{row.limit:g}", row.unit, row.basis)
    console.print(table)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and all medians to FILE")
    parser.add_argument("--rounds", type=int, default=300, help="how often each case runs (default: 300)")
    arguments = parser.parse_args()
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=7 * (WARM_UP_ROUNDS + arguments.rounds))
        with bench_server() as server:

            def tick() -> None:
                progress.advance(task)

            rows: list[Row] = []
            medians: dict[str, Medians] = {}
            for protocol in ("grpc", "http"):
                of_this, medians[protocol] = of_protocol(protocol, server, arguments.rounds, tick)
                rows += of_this
            with models_on_a_core_of_their_own(server):
                rows += own_times(server, "a core of its own", arguments.rounds, tick)
            rows += own_times(server, "a core that is shared", arguments.rounds, tick)
            rows.append(fencing(arguments.rounds, tick))
    show(console, rows)
    if arguments.json:
        figures = [{**asdict(row), "holds": row.holds} for row in rows]
        arguments.json.write_text(json.dumps({"figures": figures, "medians_ms": medians}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
