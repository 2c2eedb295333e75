"""What the modes beside one request for one response gain: batches, calls from model to model, streams.

Each is measured in the same run as what the Python backend offers without this library, or without the mode.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np
import tritonclient.grpc

from shm_backend_utils.client import PreparedCall, ShmClient

from ...common.figures import Figure
from ...common.photographs import load_photographs
from ..rounds import Bench
from ..server import models_on_a_core_of_their_own

__all__ = ["modes"]

REQUESTS: Final = 8
ROW_SIZES: Final = {"[1, 3, 224, 224]": 3 * 224 * 224, "[1, 16]": 16}
LEAST_BATCH_GAIN: Final = 1.5
PERIOD_S: Final = 1.0
PERIODS: Final = 7

PHOTOGRAPHS: Final = 16
LEAST_PIPELINE_GAIN: Final = 2.0
IDENTITY_BYTES: Final = 2**26
LEAST_IDENTITY_GAIN: Final = 100.0

FRAMES: Final = 1000
PLACES: Final = 4
STREAM_ROUNDS: Final = 5
LEAST_STREAM_GAIN: Final = 5.0


def modes(bench: Bench) -> list[Figure]:
    """Measure them, over gRPC."""
    with models_on_a_core_of_their_own(bench.server):
        batches = [figure for shape, size in ROW_SIZES.items() for figure in _batch(bench, shape, size)]
    return [*batches, _pipeline(bench), _identity(bench), _stream(bench)]


class _Rates(NamedTuple):
    """What a model did in one period."""

    per_second: float
    execute_us: float
    gathered_bytes: int


def _batch(bench: Bench, shape: str, row_size: int) -> list[Figure]:
    """Measure a model that serves all requests at once beside one that serves them one by one."""
    name = f"{REQUESTS} requests of {shape}, side by side"
    measured: dict[str, list[_Rates]] = {"multiply_each": [], "multiply_together": []}
    with ShmClient(bench.server.grpc_url) as client, ExitStack() as stack:
        calls = {model: _side_by_side(stack, client, model, row_size) for model in measured}
        for _ in bench.shown(name, PERIODS):
            for model, rates in measured.items():
                rates.append(_rates(client, model, calls[model]))
    each, together = (rates[1:] for rates in measured.values())
    per_second = _median(lambda rates: rates.per_second, each), _median(lambda rates: rates.per_second, together)
    execute_us = _median(lambda rates: rates.execute_us, each), _median(lambda rates: rates.execute_us, together)
    return [
        Figure(
            f"{name}: serve_batch",
            per_second[1] / per_second[0],
            "× the requests per second of serve",
            f"{per_second[1]:,.0f} /s / {per_second[0]:,.0f} /s",
            at_least=LEAST_BATCH_GAIN,
        ),
        Figure(
            f"{name}: execute with serve",
            execute_us[0] / execute_us[1],
            "× the time of serve_batch",
            f"{execute_us[0]:.0f} µs / {execute_us[1]:.0f} µs",
        ),
        Figure(
            f"{name}: gathered",
            max(rates.gathered_bytes for rates in together),
            "bytes",
            "the largest batch",
            at_most=0,
        ),
    ]


def _side_by_side(stack: ExitStack, client: ShmClient, model: str, row_size: int) -> list[PreparedCall]:
    inputs = {"X": ((1, row_size), np.float32)}
    prepared = [client.prepare(model, inputs, outputs={"Y": row_size * 4}) for _ in range(REQUESTS)]
    return [stack.enter_context(call) for call in prepared]


def _rates(client: ShmClient, model: str, calls: list[PreparedCall]) -> _Rates:
    """Have a thread for each call repeat it for a while."""
    _told(client, model)
    begin = time.perf_counter()
    counts: list[int] = []

    def work(call: PreparedCall) -> None:
        count = 0
        while time.perf_counter() < begin + PERIOD_S:
            call.infer().release()
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - begin
    told = _told(client, model)
    full = told[told[:, 0] == REQUESTS]
    return _Rates(sum(counts) / elapsed_s, float(np.median(full[:, 1])) / 1e3, int(full[:, 2].max()))


def _told(client: ShmClient, model: str) -> Any:
    """Return what the model tells of each execute since it was asked: requests, nanoseconds, bytes gathered."""
    result = client.infer(model, {"X": np.zeros((1, 1), np.float32)}, outputs={"TOLD": 2**20})
    return result["TOLD"].reshape(-1, 3)


def _median(value: Callable[[_Rates], float], rates: list[_Rates]) -> float:
    return statistics.median(map(value, rates))


def _pipeline(bench: Bench) -> Figure:
    """Measure two models on each of some photographs, one after another."""
    photographs = list(load_photographs().values())
    name = f"pipeline over call.forward, {PHOTOGRAPHS} photographs"
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))

        def calls_of(model: str) -> Callable[[], None]:
            calls = []
            for number in range(PHOTOGRAPHS):
                photograph = photographs[number % len(photographs)]
                call = stack.enter_context(client.prepare(model, {"IMAGE": (photograph.shape, np.uint8)}))
                call.inputs["IMAGE"][:] = photograph
                calls.append(call)

            def infer_all() -> None:
                for call in calls:
                    call.infer().release()

            return infer_all

        cases = {"over call.forward": calls_of("pipeline"), "over BLS": calls_of("pipeline_over_bls")}
        medians = bench.measure(name, cases, max(bench.rounds // 10, 1))
    return medians.ratio(
        name, "over BLS", "over call.forward", "× as fast as over ordinary BLS", at_least=LEAST_PIPELINE_GAIN
    )


def _identity(bench: Bench) -> Figure:
    """Measure what a model waits for another that gives back a large tensor."""
    name = f"identity of {IDENTITY_BYTES >> 20} MiB over call.forward, in model.py"
    rounds = max(bench.rounds // 10, 1)
    took_ms: dict[bool, list[float]] = {False: [], True: []}
    with ShmClient(bench.server.grpc_url) as client, ExitStack() as stack:
        calls = {}
        for over_bls in took_ms:
            inputs, parameters = {"X": ((IDENTITY_BYTES // 4,), np.float32)}, {"over_bls": over_bls}
            calls[over_bls] = stack.enter_context(client.prepare("relay", inputs, parameters=parameters))
        for number in bench.rounds_with_warm_up(name, rounds):
            for over_bls, call in calls.items():
                call.inputs["X"][-1] = number
                with call.infer() as result:
                    assert result["LAST"][0] == number
                    took_ms[over_bls].append(int(result["TOOK_NS"][0]) / 1e6)
    forwarded, ordinary = (statistics.median(times[-rounds:]) for times in took_ms.values())
    return Figure(
        name,
        ordinary / forwarded,
        "× as fast as over ordinary BLS",
        f"{ordinary:.3f} ms / {forwarded:.3f} ms",
        at_least=LEAST_IDENTITY_GAIN,
    )


def _stream(bench: Bench) -> Figure:
    """Measure frames in a ring beside the responses of a decoupled model as Triton carries them."""
    name = f"stream of {FRAMES:,} frames of 1 MB through {PLACES} places"
    count = np.array([FRAMES], np.int64)
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.server.grpc_url))
        plain = bench.plain_client("grpc")
        stack.callback(plain.close)

        def in_a_ring() -> float:
            begin = time.perf_counter()
            numbers = [result["FRAME"][0] for result in client.stream("many_frames", {"COUNT": count}, frames=PLACES)]
            assert len(numbers) == FRAMES
            return time.perf_counter() - begin

        pairs = []
        for _ in bench.shown(name, 1 + STREAM_ROUNDS):
            pairs.append((_plain_stream_s(plain, count), in_a_ring()))
    theirs, ours = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    basis = f"{theirs * 1e3:,.0f} ms / {ours * 1e3:,.0f} ms"
    return Figure(name, theirs / ours, "× as fast as Triton's own responses", basis, at_least=LEAST_STREAM_GAIN)


def _plain_stream_s(plain: Any, count: Any) -> float:
    """Return what tritonclient takes for the same frames."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor = tritonclient.grpc.InferInput("COUNT", [1], "INT64")
    tensor.set_data_from_numpy(count)
    plain.start_stream(lambda result, error: answers.put(error or result))
    try:
        begin = time.perf_counter()
        plain.async_stream_infer("many_frames", [tensor])
        numbers = [answers.get().as_numpy("FRAME")[0] for _ in range(FRAMES)]
        assert len(numbers) == FRAMES
        return time.perf_counter() - begin
    finally:
        plain.stop_stream()
