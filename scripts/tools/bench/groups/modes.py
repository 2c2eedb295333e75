"""Batches, calls of other models, and streams, each beside a model with pb_utils alone."""

from __future__ import annotations

import concurrent.futures
import queue
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

from shm_backend_utils.client import PoolOptions, PreparedCall, ShmClient

from ...figures import Figure, in_words
from ..bench import Bench, Medians
from ..ways import RegisteredPair

REQUESTS: Final = 8
ROW: Final = (1, 3, 1080, 1920)
ROW_BYTES: Final = 4 * 3 * 1080 * 1920

Images = npt.NDArray[np.float32]


def batches(bench: Bench) -> list[Figure]:
    """Measure how long eight calls take that come at once; both clients work in shared memory that is filled."""
    with ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(REQUESTS))
        ours, stock = _SessionCalls(bench, stack), _StockCalls(bench, stack)
        cases: dict[str, Callable[[], object]] = {
            "ours": lambda: list(pool.map(ours.infer, range(REQUESTS))),
            "stock": lambda: list(pool.map(stock.infer, range(REQUESTS))),
        }
        for case in cases.values():
            case()
        for results in (ours.results, stock.results()):
            _check_doubles(results)
        name = f"{REQUESTS} calls at once of {list(ROW[1:])}, ×2, side by side"
        medians = bench.measure(name, cases, bench.amounts.slow_rounds)
        _check_doubles(ours.results)
    unit = "× as fast as a pb_utils model that concatenates"
    figure = medians.ratio(name, "stock", "ours", unit, at_least=3.0)
    return [replace(figure, basis=f"{figure.basis}; bytes copied to join them: {ours.gathered_bytes}")]


class _SessionCalls:
    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        pool = PoolOptions(max_batch_bytes=4 * REQUESTS * ROW_BYTES)
        client = stack.enter_context(ShmClient(bench.server.grpc_url, pool=pool))
        self.results: list[Images] = [np.empty(0, np.float32)] * REQUESTS
        self.gathered_bytes = 0
        for call in self._prepared(client):  # from now on the client knows that these calls come together
            call.close()
        self._calls = self._prepared(client)
        for number, call in enumerate(self._calls):
            stack.callback(call.close)
            call.inputs["X"][:] = number

    def infer(self, number: int) -> None:
        with self._calls[number].infer() as result:
            self.gathered_bytes = int(result["GATHERED"].flat[0])
            self.results[number] = result["Y"]

    @staticmethod
    def _prepared(client: ShmClient) -> list[PreparedCall]:
        return [client.prepare("session_batch", {"X": (ROW, np.float32)}) for _ in range(REQUESTS)]


class _StockCalls:
    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._plain = plain = stack.enter_context(bench.plain_client())
        self._pairs = [RegisteredPair(stack, plain, "grpc", ROW_BYTES, ("X", "Y")) for _ in range(REQUESTS)]
        for number, pair in enumerate(self._pairs):
            pair.fill(np.full(ROW, number, np.float32))

    def infer(self, number: int) -> None:
        self._plain.infer("stock_batch", self._pairs[number].inputs, outputs=self._pairs[number].outputs)

    def results(self) -> list[Images]:
        return [pair.received(ROW) for pair in self._pairs]


def _check_doubles(results: Iterable[Images]) -> None:
    for number, images in enumerate(results):
        if not (images == 2 * number).all():
            raise AssertionError("a model for batches does not double its rows")


LEAST_GAIN_OF_SMALL_ONES: Final = 1.0
ROUNDS_PER_ROUND: Final = 5


def forwarding(bench: Bench) -> list[Figure]:
    """Measure it inside the models: `identity` is asked by one with a ShmSession, `stock_identity` by one without."""
    rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
    return [
        _forwarding(bench, 6 * 2**10, rounds, LEAST_GAIN_OF_SMALL_ONES),
        _forwarding(bench, 2**26, bench.amounts.slow_rounds, 100.0),
    ]


def _forwarding(bench: Bench, byte_size: int, rounds: int, least_gain: float) -> Figure:
    name = f"BLS identity of {in_words(byte_size)} by call.forward, in model.py"
    taken_ms: dict[str, list[float]] = {"ours": [], "ordinary": []}
    with (
        bench.plain_client() as plain,
        ShmClient(bench.server.grpc_url) as client,
        client.prepare("session_relay", {"X": ((byte_size // 4,), np.float32)}, path="direct") as call,
    ):
        for number in bench.rounds_with_warm_up(name, rounds):  # of which the last ones count
            last = number % 100
            call.inputs["X"][-1] = last
            with call.infer() as result:
                taken_ms["ours"].append(_milliseconds(result, last))
            taken_ms["ordinary"].append(_milliseconds(_ask_stock(plain, byte_size // 4, last), last))
    medians = Medians({case: statistics.median(each[-rounds:]) for case, each in taken_ms.items()})
    return medians.ratio(name, "ordinary", "ours", "× as fast as an ordinary BLS request", at_least=least_gain)


def _ask_stock(plain: Any, count: int, last: int) -> dict[str, Any]:
    tensor = tritonclient.grpc.InferInput("X", [2], "FP32").set_data_from_numpy(np.array([count, last], np.float32))
    answer = plain.infer("stock_relay", [tensor])
    return {name: answer.as_numpy(name) for name in ("LAST", "TOOK_NS")}


def _milliseconds(answer: Any, last: int) -> float:
    if answer["LAST"][0] != last:
        raise AssertionError("the relay did not get back what it sent")
    return int(answer["TOOK_NS"][0]) / 1e6


FRAMES: Final = np.array([1000, 1_000_000])
"""How many, and their bytes."""
SMALL_FRAMES: Final = np.array([7, 2**12])
UNIT_OF_STREAMS: Final = "× as fast as Triton's own responses"


def streams(bench: Bench) -> list[Figure]:
    """Measure streams of a client that is kept, and the first of a client: it has nothing learned, no memory taken."""
    return [_small_streams(bench), *_first_streams(bench)]


def _small_streams(bench: Bench) -> Figure:
    what = "a stream of 7 frames of 4 KiB"
    with ShmClient(bench.server.grpc_url) as client, _stock_stream(bench) as check_frames:
        cases = {
            "ours": lambda: _check_frames(client.stream("session_frames", {"FRAMES": SMALL_FRAMES}), SMALL_FRAMES),
            "stock": lambda: check_frames(SMALL_FRAMES),
        }
        medians = bench.measure(what, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
    return medians.ratio(what, "stock", "ours", UNIT_OF_STREAMS, at_least=LEAST_GAIN_OF_SMALL_ONES)


def _first_streams(bench: Bench) -> list[Figure]:
    what = f"a client's first stream of {FRAMES[0]:,} frames of 1 MB"
    cases = {
        "told": lambda: _first_of_ours(bench, {"FRAME": int(FRAMES[1])}),
        "not told": lambda: _first_of_ours(bench, None),
        "stock": lambda: _first_of_stock(bench),
    }
    medians = bench.measure(what, cases, min(5, bench.amounts.slow_rounds), warm_up_rounds=1)
    return [
        medians.ratio(f"{what}, whose size it is {case}", "stock", case, UNIT_OF_STREAMS, at_least=5.0)
        for case in ("told", "not told")
    ]


def _first_of_ours(bench: Bench, outputs: dict[str, int | None] | None) -> None:
    with ShmClient(bench.server.grpc_url) as client:
        stream = client.stream("session_frames", {"FRAMES": FRAMES}, outputs=outputs, frames=4)
        _check_frames(stream, FRAMES)


def _first_of_stock(bench: Bench) -> None:
    with _stock_stream(bench) as check_frames:
        check_frames(FRAMES)


@contextmanager
def _stock_stream(bench: Bench) -> Iterator[Callable[[npt.NDArray[np.int64]], None]]:
    """Open a stream for a block; return a function that makes a request, and raises if a frame is wrong."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def check_frames(frames: npt.NDArray[np.int64]) -> None:
        tensor = tritonclient.grpc.InferInput("FRAMES", [2], "INT64").set_data_from_numpy(frames)
        plain.async_stream_infer("stock_frames", [tensor])
        received = (answers.get() for _ in range(frames[0]))
        _check_frames(({"FRAME": answer.as_numpy("FRAME")} for answer in received), frames)

    with bench.plain_client() as plain:
        plain.start_stream(lambda result, error: answers.put(error or result))
        yield check_frames  # and closing the client ends its stream


def _check_frames(answers: Iterable[Mapping[str, Any]], frames: npt.NDArray[np.int64]) -> None:
    if [int(answer["FRAME"][-1]) for answer in answers] != [number % 256 for number in range(frames[0])]:
        raise AssertionError("the frames are not those that were sent")
