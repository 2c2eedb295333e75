"""A stream of large frames in a ring, beside the responses of a decoupled model as Triton carries them."""

from __future__ import annotations

import queue
from typing import Any, Final

import numpy as np
import tritonclient.grpc

from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Bench

__all__ = ["streams"]

FRAMES: Final = 1000
FRAME_BYTES: Final = 1_000_000
PLACES: Final = 4
LEAST_GAIN: Final = 5.0
ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 1


def streams(bench: Bench) -> list[Figure]:
    """Measure the first stream of a client, each time a new one: it has nothing learned, and no memory taken yet.

    Once the caller says how large a frame is, once the configuration leaves that open, and so does the caller.
    """
    what = f"a client's first stream of {FRAMES:,} frames of 1 MB"
    count = np.array([FRAMES], np.int64)
    cases = {
        "told": lambda: _ours(bench, count, {"FRAME": FRAME_BYTES}),
        "not told": lambda: _ours(bench, count, None),
        "stock": lambda: _stock(bench, count),
    }
    rounds = min(ROUNDS, bench.amounts.slow_rounds)
    medians = bench.measure(what, cases, rounds, warm_up_rounds=WARM_UP_ROUNDS)
    unit = "× as fast as Triton's own responses"
    return [
        Figure(
            f"{what}, whose size it is {case}",
            medians["stock"] / medians[case],
            unit,
            medians.pair("stock", case),
            at_least=LEAST_GAIN,
        )
        for case in ("told", "not told")
    ]


def _ours(bench: Bench, count: Any, outputs: dict[str, int | None] | None) -> None:
    with ShmClient(bench.server.grpc_url) as client:
        frames = client.stream("session_frames", {"COUNT": count}, outputs=outputs, frames=PLACES)
        _check([int(result["FRAME"][-1]) for result in frames])


def _stock(bench: Bench, count: Any) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor = tritonclient.grpc.InferInput("COUNT", [1], "INT64")
    tensor.set_data_from_numpy(count)
    plain = bench.plain_client()
    try:
        plain.start_stream(lambda result, error: answers.put(error or result))
        plain.async_stream_infer("stock_frames", [tensor])
        _check([int(answers.get().as_numpy("FRAME")[-1]) for _ in range(FRAMES)])
        plain.stop_stream()
    finally:
        plain.close()


def _check(numbers: list[int]) -> None:
    if numbers != [number % 256 for number in range(FRAMES)]:
        raise AssertionError("the frames are not those that were sent")
