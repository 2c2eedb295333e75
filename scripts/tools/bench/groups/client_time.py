"""What the library itself takes in an application: a call of 64 bytes, less one of tritonclient to the same model.

That call has its descriptor ready: it does what any client must do, and nothing that makes it safe or easy.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.memory.managed import ManagedRegion

from ...common.figures import Figure
from ..rounds import AsyncCases, Bench, Medians

__all__ = ["client_time"]

MODEL: Final = "identity"
LENGTH: Final = 16
INFER_US: Final = 60.0
ASYNC_INFER_US: Final = 80.0
ROUNDS_PER_ROUND: Final = 10
"""The figures are small differences of noisy times, and a call takes no time."""


class ReadySlot:
    """A slot with its descriptor, as docs/protocol.md has it."""

    def __init__(self, stack: ExitStack | AsyncExitStack) -> None:
        region = ManagedRegion.create(8192)
        stack.callback(region.close)
        stack.callback(region.segment.unlink)
        self._record = region.record(0)
        self._generation = 0
        begin, nbytes = region.data_offset, 4 * LENGTH
        claim = {
            "kind": "system",
            "key": region.segment.key,
            "byte_size": region.header.byte_size,
            "token": region.header.token.hex(),
            "slot": 0,
        }
        self._descriptor = json.dumps(
            {
                "v": 1,
                "model": MODEL,
                "regions": [claim],
                "inputs": {"INPUT0": [0, begin, nbytes, "FP32", [LENGTH]]},
                "outputs": {"OUTPUT0": [0, begin + 4096, nbytes]},
            }
        )

    def parameters(self) -> dict[str, Any]:
        """Begin the next request."""
        self._generation += 1
        self._record.generation = self._generation
        return {"shm_io": self._descriptor, "shm_generation": self._generation}

    def check(self) -> None:
        """Raise if the last request did not reach the slot: then nothing was measured."""
        if self._record.completed != self._generation:
            raise AssertionError("the bare call did not use its slot")


def client_time(bench: Bench) -> list[Figure]:
    """Measure both clients over gRPC."""
    return [*_blocking(bench), *asyncio.run(_async(bench))]


def _blocking(bench: Bench) -> list[Figure]:
    tensor = np.ones(LENGTH, np.float32)
    with ExitStack() as stack:
        slot = ReadySlot(stack)
        bare = bench.plain_client("grpc")
        stack.callback(bare.close)
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        call = stack.enter_context(client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}))
        cases = {
            "bare": lambda: bare.infer(MODEL, [], parameters=slot.parameters()),
            "infer": lambda: client.infer(MODEL, {"INPUT0": tensor})["OUTPUT0"],
            "prepared": lambda: call.infer()["OUTPUT0"],
        }
        medians = bench.measure("the client's own time", cases, ROUNDS_PER_ROUND * bench.rounds)
        slot.check()
    return _figures(medians, "ShmClient", "PreparedCall", INFER_US)


async def _async(bench: Bench) -> list[Figure]:
    tensor = np.ones(LENGTH, np.float32)
    async with AsyncExitStack() as stack:
        slot = ReadySlot(stack)
        bare = await stack.enter_async_context(tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url))
        client = await stack.enter_async_context(AsyncShmClient(bench.server.grpc_url))
        call = stack.enter_context(await client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}))
        cases: AsyncCases = {
            "bare": lambda: bare.infer(MODEL, [], parameters=slot.parameters()),
            "infer": lambda: client.infer(MODEL, {"INPUT0": tensor}),
            "prepared": call.infer,
        }
        medians = await bench.measure_async("the async client's own time", cases, ROUNDS_PER_ROUND * bench.rounds)
        slot.check()
    return _figures(medians, "AsyncShmClient", "AsyncPreparedCall", ASYNC_INFER_US)


def _figures(medians: Medians, client: str, call: str, limit_us: float) -> list[Figure]:
    def above_bare(case: str) -> tuple[float, str, str]:
        over_us = (medians[case] - medians["bare"]) * 1e3
        return over_us, "µs above tritonclient", f"{medians[case] * 1e3:.0f} µs - {medians['bare'] * 1e3:.0f} µs"

    return [
        Figure(f"{client}.infer, own time, 64 B", *above_bare("infer"), at_most=limit_us),
        Figure(f"{call}.infer, own time, 64 B", *above_bare("prepared")),
    ]
