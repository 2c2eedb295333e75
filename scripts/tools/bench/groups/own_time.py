"""What the library itself takes in a model's process: all of `execute`, and the fencing alone."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Final

import numpy as np
import tritonclient.grpc

from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.direct import DirectPlan, DirectTensors
from shm_backend_utils.model.manager import SharedMemoryManager
from shm_backend_utils.model.regions import Resolver
from shm_backend_utils.model.settings import Settings
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.descriptor import Descriptor, SystemRegionClaim

from ...common.figures import Figure
from ..rounds import Bench
from ..server import models_on_a_core_of_their_own

__all__ = ["own_time"]

IN_EXECUTE_US: Final = {1: 20.0, 8: 50.0}
FENCING_US: Final = 10.0


def own_time(bench: Bench) -> list[Figure]:
    """Measure it.

    Between two requests the caches are filled with the code of whatever else runs on the core, so it matters where.
    """
    with models_on_a_core_of_their_own(bench.server):
        figures = _in_execute(bench, "a core of its own")
    return [*figures, *_in_execute(bench, "a core that is shared"), _fencing(bench)]


def _in_execute(bench: Bench, where: str) -> list[Figure]:
    """Measure `execute` of a model with the library, less that of a model without."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        bare = bench.plain_client("grpc")
        stack.callback(bare.close)
        for tensor_count, limit_us in IN_EXECUTE_US.items():
            inputs = {f"X{index}": ((1,), np.int64) for index in range(tensor_count)}
            outputs = [f"Y{index}" for index in range(tensor_count)]
            call = stack.enter_context(client.prepare("own_time", inputs, outputs=outputs))
            whole_us = []
            name = f"own time in execute, {tensor_count} in and {tensor_count} out, {where}"
            for _ in bench.rounds_with_warm_up(name):
                bare.infer("bare_time", [], parameters={"x": 1})
                with call.infer() as result:
                    whole_us.append(int(result["Y0"][0]) / 1e3)
            ask = tritonclient.grpc.InferInput("ASK", [1], "INT64")
            ask.set_data_from_numpy(np.zeros(1, np.int64))
            bare_us = bare.infer("bare_time", [ask]).as_numpy("TIMES_NS") / 1e3
            whole = statistics.median(whole_us[-bench.rounds :])
            without = float(np.median(bare_us[-bench.rounds :]))
            basis = f"{whole:.1f} µs - {without:.1f} µs"
            figures.append(Figure(name, whole - without, "µs", basis, at_most=limit_us))
    return figures


def _fencing(bench: Bench) -> Figure:
    """Measure what a request pays for being safe: checking region and generation, the lease both ways."""
    name = "fencing, leases and checks of one request"
    spec = ModelSpec.from_config({"name": "bench", "parameters": {"SHM_PATHS": {"string_value": "direct"}}})
    manager = SharedMemoryManager()
    region = ManagedRegion.create(4096)
    try:
        claim = SystemRegionClaim(region.segment.key, region.header.byte_size, region.header.token.hex(), 0)
        resolved = Resolver(Settings(), manager, CudaAccess()).resolve(claim, "regions[0]", [])
        plan = DirectPlan(Descriptor("bench", (claim,), {}, {}), spec, [resolved])
        times_us = []
        for generation, _ in enumerate(bench.rounds_with_warm_up(name), 1):
            region.record(0).generation = generation
            begin = time.perf_counter()
            plan.check()
            manager.begin_use(plan.mapped)
            DirectTensors(plan, generation).fail()
            manager.end_use(plan.mapped)
            times_us.append((time.perf_counter() - begin) * 1e6)
    finally:
        manager.unregister_all()
        region.segment.unlink()
        region.close()
    return Figure(name, statistics.median(times_us[-bench.rounds :]), "µs", "in a loop", at_most=FENCING_US)
