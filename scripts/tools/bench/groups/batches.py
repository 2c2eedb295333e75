"""Eight large calls at once: a batch that lies side by side, beside a pb_utils model that concatenates."""

from __future__ import annotations

import concurrent.futures
import os
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
from tritonclient.utils import shared_memory

from shm_backend_utils.cli.common.registered_regions import registered_region
from shm_backend_utils.client import PoolOptions, PreparedCall, ShmClient

from ...figures import Figure
from ..bench import Bench

__all__ = ["batches"]

REQUESTS: Final = 8
ROW: Final = (1, 3, 1080, 1920)
ROW_BYTES: Final = 4 * 3 * 1080 * 1920
LEAST_GAIN: Final = 3.0

Images = npt.NDArray[np.float32]


def batches(bench: Bench) -> list[Figure]:
    """Measure how long eight calls take that come at once. Neither client copies: both work in memory that is filled.

    The stock model gets its rows by Triton's own shared memory, as in band they would take far longer.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(REQUESTS))
        ours, stock = _SessionCalls(bench, stack), _StockCalls(bench, stack)
        for each in (ours, stock):
            list(pool.map(each.infer, range(REQUESTS)))
            each.check()
        cases = {
            "ours": lambda: list(pool.map(ours.infer, range(REQUESTS))),
            "stock": lambda: list(pool.map(stock.infer, range(REQUESTS))),
        }
        name = f"{REQUESTS} calls at once of {list(ROW[1:])}, ×2, side by side"
        medians = bench.measure(name, cases, bench.amounts.slow_rounds)
        ours.check()
    unit = "× as fast as a pb_utils model that concatenates"
    basis = f"{medians.pair('stock', 'ours')}; bytes copied to join them: {ours.gathered_bytes}"
    return [Figure(name, medians["stock"] / medians["ours"], unit, basis, at_least=LEAST_GAIN)]


class _SessionCalls:
    """Prepared calls of a model with serve_batch."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        pool = PoolOptions(max_batch_bytes=4 * REQUESTS * ROW_BYTES)
        client = stack.enter_context(ShmClient(bench.server.grpc_url, pool=pool))
        self._results: list[Images] = [np.empty(0, np.float32)] * REQUESTS
        self.gathered_bytes = 0
        for call in self._prepared(client):  # from now on the client knows that these calls come together
            call.close()
        self._calls = self._prepared(client)
        for number, call in enumerate(self._calls):
            stack.callback(call.close)
            call.inputs["X"][:] = number

    def infer(self, number: int) -> None:
        """Make one call."""
        with self._calls[number].infer() as result:
            self.gathered_bytes = int(result["GATHERED"].flat[0])
            self._results[number] = result["Y"]

    def check(self) -> None:
        """Raise unless the last results are right."""
        for number, images in enumerate(self._results):
            if not (images == 2 * number).all():
                raise AssertionError("session_batch does not double its rows")

    @staticmethod
    def _prepared(client: ShmClient) -> list[PreparedCall]:
        return [client.prepare("session_batch", {"X": (ROW, np.float32)}) for _ in range(REQUESTS)]


class _StockCalls:
    """Requests of tritonclient in regions that are registered."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._plain = bench.plain_client()
        stack.callback(self._plain.close)
        self._requests: list[tuple[Any, Any, Any]] = []
        for number in range(REQUESTS):
            name = f"bench-{os.getpid()}-batch-{number}"
            x, y = (registered_region(stack, self._plain, f"{name}-{way}", ROW_BYTES) for way in ("in", "out"))
            shared_memory.set_shared_memory_region(x.handle, [np.full(ROW, number, np.float32)])
            tensor = tritonclient.grpc.InferInput("X", list(ROW), "FP32")
            tensor.set_shared_memory(x.name, ROW_BYTES)
            output = tritonclient.grpc.InferRequestedOutput("Y")
            output.set_shared_memory(y.name, ROW_BYTES)
            self._requests.append((tensor, output, y.handle))

    def infer(self, number: int) -> None:
        """Make one call."""
        tensor, output, _ = self._requests[number]
        self._plain.infer("stock_batch", [tensor], outputs=[output])

    def check(self) -> None:
        """Raise unless the last results are right."""
        for number, (_, _, handle) in enumerate(self._requests):
            if not (shared_memory.get_contents_as_numpy(handle, np.float32, ROW) == 2 * number).all():
                raise AssertionError("stock_batch does not double its rows")
