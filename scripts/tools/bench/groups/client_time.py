"""What the client itself takes: `infer`, less a call of tritonclient that does the same with everything ready.

That call has its table written and its parameters made: it does what any client must do, and nothing that makes it safe
or easy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio

from shm_backend_utils.client import AsyncShmClient
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

from ...figures import Figure
from ..bench import AsyncCases, Bench, Medians
from ..payloads import endless, repeated, varying

MODEL: Final = "identity"
LENGTH: Final = 16
MOST_US: Final = 50.0
SHAPES_BYTES: Final = 4096
OTHER_SHAPES_OVER_REPEATED: Final = 1.15
ROUNDS_PER_ROUND: Final = 10
"""The figures are small differences of noisy times, and a call takes no time."""


class ReadySlot:
    """A slot with its table written, as docs/protocol.md has it."""

    def __init__(self, stack: ExitStack | AsyncExitStack) -> None:
        region = ManagedRegion.create(2 * 4096)
        stack.callback(region.close)
        stack.callback(region.segment.unlink)
        begin, byte_size = region.data_offset, 4 * LENGTH
        self._table = table.encode(
            Table(
                {"INPUT0": InputSpan(BY_NAME["FP32"], (LENGTH,), 0, begin, byte_size)},
                {"OUTPUT0": OutputSpan(0, begin + 4096, byte_size)},
            )
        )
        self._record = region.record(0)
        self._record.begin(0, self._table)
        self._generation = 0
        self._address = str(SlotAddress(MODEL, region.segment.key, region.header.token.hex(), 0))

    def parameters(self) -> dict[str, Any]:
        """Begin the next request."""
        self._generation += 1
        self._record.generation = self._generation
        return {SLOT_PARAMETER: self._address, GENERATION_PARAMETER: self._generation}

    def check(self) -> None:
        """Raise if the last request did not reach the slot: then nothing was measured."""
        if self._record.completed != self._generation:
            raise AssertionError("the bare call did not use its slot")


def client_time(bench: Bench) -> list[Figure]:
    """Measure both clients over gRPC, and what shapes that change cost."""
    return [*_blocking(bench), *asyncio.run(_async(bench)), _other_shapes(bench)]


def _blocking(bench: Bench) -> list[Figure]:
    tensor = np.ones(LENGTH, np.float32)
    with ExitStack() as stack:
        slot = ReadySlot(stack)
        bare = bench.plain_client()
        stack.callback(bare.close)
        client = stack.enter_context(bench.direct_client())
        call = stack.enter_context(client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}))
        cases = {
            "bare": lambda: bare.infer(MODEL, [], parameters=slot.parameters()),
            "infer": lambda: client.infer(MODEL, {"INPUT0": tensor})["OUTPUT0"],
            "prepared": lambda: call.infer()["OUTPUT0"],
        }
        medians = bench.measure("the client's own time", cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
        slot.check()
    return _figures(medians, "ShmClient", "PreparedCall")


async def _async(bench: Bench) -> list[Figure]:
    tensor = np.ones(LENGTH, np.float32)
    async with AsyncExitStack() as stack:
        slot = ReadySlot(stack)
        bare = await stack.enter_async_context(tritonclient.grpc.aio.InferenceServerClient(bench.server.grpc_url))
        client = await stack.enter_async_context(AsyncShmClient(bench.server.grpc_url, inline_bytes=0))
        call = stack.enter_context(await client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}))
        cases: AsyncCases = {
            "bare": lambda: bare.infer(MODEL, [], parameters=slot.parameters()),
            "infer": lambda: client.infer(MODEL, {"INPUT0": tensor}),
            "prepared": call.infer,
        }
        rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
        medians = await bench.measure_async("the async client's own time", cases, rounds)
        slot.check()
    return _figures(medians, "AsyncShmClient", "AsyncPreparedCall")


def _figures(medians: Medians, client: str, call: str) -> list[Figure]:
    def above_bare(case: str) -> tuple[float, str, str]:
        over_us = (medians[case] - medians["bare"]) * 1e3
        basis = f"{medians[case] * 1e3:.0f} µs - {medians['bare'] * 1e3:.0f} µs"
        return over_us, "µs above tritonclient with a slot made ready", basis

    return [
        Figure(f"{client}.infer, own time, 64 B", *above_bare("infer"), at_most=MOST_US),
        Figure(f"{call}.infer, own time, 64 B", *above_bare("prepared")),
    ]


def _other_shapes(bench: Bench) -> Figure:
    """Measure `infer` where every request has another shape, beside the same where all have one."""
    with bench.direct_client() as client:

        def infers(arrays: list[Any]) -> Callable[[], object]:
            given = endless(arrays)

            def infer() -> float:
                x = next(given)
                with client.infer(MODEL, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                    return float(result["OUTPUT0"][-1])

            return infer

        cases = {"other": infers(varying(SHAPES_BYTES)), "same": infers(repeated(SHAPES_BYTES))}
        medians = bench.measure("infer, shapes that change", cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
    return medians.ratio(
        f"infer, every request another shape, around {SHAPES_BYTES >> 10} KiB, round trip",
        "other",
        "same",
        "× repeated shapes",
        at_most=OTHER_SHAPES_OVER_REPEATED,
    )
