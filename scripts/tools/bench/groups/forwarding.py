"""What a model waits for another that gives back a large tensor: by call.forward, and by an ordinary BLS request."""

from __future__ import annotations

import statistics
from typing import Any, Final

import numpy as np
import tritonclient.grpc

from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Bench

__all__ = ["forwarding"]

BYTES: Final = 2**26
LEAST_GAIN: Final = 100.0


def forwarding(bench: Bench) -> list[Figure]:
    """Measure it inside the models: `identity` is asked by one with a ShmSession, `stock_identity` by one without."""
    name = f"BLS identity of {BYTES >> 20} MiB by call.forward, in model.py"
    forwarded_ms: list[float] = []
    ordinary_ms: list[float] = []
    plain = bench.plain_client()
    try:
        with (
            ShmClient(bench.server.grpc_url) as client,
            client.prepare("session_relay", {"X": ((BYTES // 4,), np.float32)}) as call,
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
    return [Figure(name, theirs / ours, "× as fast as an ordinary BLS request", basis, at_least=LEAST_GAIN)]


def _ask_stock(plain: Any, last: int) -> dict[str, Any]:
    tensor = tritonclient.grpc.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([BYTES // 4, last], np.float32))
    answer = plain.infer("stock_relay", [tensor])
    return {name: answer.as_numpy(name) for name in ("LAST", "TOOK_NS")}


def _milliseconds(answer: Any, last: int) -> float:
    if answer["LAST"][0] != last:
        raise AssertionError("the relay did not get back what it sent")
    return int(answer["TOOK_NS"][0]) / 1e6
