"""What is more than a call: batches, calls of other models and streams, each beside a model with pb_utils alone."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import statistics
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

REQUESTS: Final = 8
ROW: Final = (1, 3, 1080, 1920)
ROW_BYTES: Final = 4 * 3 * 1080 * 1920
LEAST_GAIN_OF_BATCHES: Final = 3.0

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
    return [Figure(name, medians["stock"] / medians["ours"], unit, basis, at_least=LEAST_GAIN_OF_BATCHES)]


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


FORWARDED_BYTES: Final = 2**26
LEAST_GAIN_OF_FORWARDING: Final = 100.0


def forwarding(bench: Bench) -> list[Figure]:
    """Measure it inside the models: `identity` is asked by one with a ShmSession, `stock_identity` by one without."""
    name = f"BLS identity of {FORWARDED_BYTES >> 20} MiB by call.forward, in model.py"
    forwarded_ms: list[float] = []
    ordinary_ms: list[float] = []
    plain = bench.plain_client()
    try:
        with (
            ShmClient(bench.server.grpc_url) as client,
            client.prepare("session_relay", {"X": ((FORWARDED_BYTES // 4,), np.float32)}) as call,
        ):
            for number in bench.rounds_with_warm_up(name, bench.amounts.slow_rounds):
                last = number % 100
                call.inputs["X"][-1] = last
                with call.infer() as result:
                    forwarded = _milliseconds(result, last)
                ordinary = _milliseconds(_ask_stock(plain, last), last)
                if number >= 0:
                    forwarded_ms.append(forwarded)
                    ordinary_ms.append(ordinary)
    finally:
        plain.close()
    ours, theirs = statistics.median(forwarded_ms), statistics.median(ordinary_ms)
    basis = f"{theirs:.3f} ms / {ours:.3f} ms"
    unit = "× as fast as an ordinary BLS request"
    return [Figure(name, theirs / ours, unit, basis, at_least=LEAST_GAIN_OF_FORWARDING)]


def _ask_stock(plain: Any, last: int) -> dict[str, Any]:
    tensor = tritonclient.grpc.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([FORWARDED_BYTES // 4, last], np.float32))
    answer = plain.infer("stock_relay", [tensor])
    return {name: answer.as_numpy(name) for name in ("LAST", "TOOK_NS")}


def _milliseconds(answer: Any, last: int) -> float:
    if answer["LAST"][0] != last:
        raise AssertionError("the relay did not get back what it sent")
    return int(answer["TOOK_NS"][0]) / 1e6


FRAMES: Final = 1000
FRAME_BYTES: Final = 1_000_000
PLACES: Final = 4
LEAST_GAIN_OF_STREAMS: Final = 5.0
STREAM_ROUNDS: Final = 5
STREAM_WARM_UP_ROUNDS: Final = 1


def streams(bench: Bench) -> list[Figure]:
    """Measure the first stream of a client, each time a new one: it has nothing learned, and no memory taken yet.

    Once the caller says how large a frame is, once the configuration leaves that open, and so does the caller.
    """
    what = f"a client's first stream of {FRAMES:,} frames of 1 MB"
    count = np.array([FRAMES], np.int64)
    cases = {
        "told": lambda: _stream_ours(bench, count, {"FRAME": FRAME_BYTES}),
        "not told": lambda: _stream_ours(bench, count, None),
        "stock": lambda: _stream_stock(bench, count),
    }
    rounds = min(STREAM_ROUNDS, bench.amounts.slow_rounds)
    medians = bench.measure(what, cases, rounds, warm_up_rounds=STREAM_WARM_UP_ROUNDS)
    unit = "× as fast as Triton's own responses"
    return [
        Figure(
            f"{what}, whose size it is {case}",
            medians["stock"] / medians[case],
            unit,
            medians.pair("stock", case),
            at_least=LEAST_GAIN_OF_STREAMS,
        )
        for case in ("told", "not told")
    ]


def _stream_ours(bench: Bench, count: Any, outputs: dict[str, int | None] | None) -> None:
    with ShmClient(bench.server.grpc_url) as client:
        frames = client.stream("session_frames", {"COUNT": count}, outputs=outputs, frames=PLACES)
        _check_frames([int(result["FRAME"][-1]) for result in frames])


def _stream_stock(bench: Bench, count: Any) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor = tritonclient.grpc.InferInput("COUNT", [1], "INT64")
    tensor.set_data_from_numpy(count)
    plain = bench.plain_client()
    try:
        plain.start_stream(lambda result, error: answers.put(error or result))
        plain.async_stream_infer("stock_frames", [tensor])
        _check_frames([int(answers.get().as_numpy("FRAME")[-1]) for _ in range(FRAMES)])
        plain.stop_stream()
    finally:
        plain.close()


def _check_frames(numbers: list[int]) -> None:
    if numbers != [number % 256 for number in range(FRAMES)]:
        raise AssertionError("the frames are not those that were sent")
