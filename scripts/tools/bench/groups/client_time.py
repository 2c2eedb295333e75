"""What the client itself takes: the time of a call, less what the connection takes that carries its request."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...figures import Figure
from ..bench import Bench
from ..payloads import endless, repeated, varying

MODEL: Final = "identity"
LENGTH: Final = 16
MOST_US: Final = 130.0
SHAPES_BYTES: Final = 4096
OTHER_SHAPES_OVER_REPEATED: Final = 1.15
ROUNDS_PER_ROUND: Final = 10


class TimedTransport:
    """A connection that knows how long its user has waited for it."""

    def __init__(self, inner: Any) -> None:
        self.waited_s = 0.0
        self._inner = inner

    def send(self, message: Any, timeout_s: float) -> Any:
        """Send a message, as the connection does."""
        begin = time.perf_counter()
        try:
            return self._inner.send(message, timeout_s)
        finally:
            self.waited_s += time.perf_counter() - begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def client_time(bench: Bench) -> list[Figure]:
    """Measure the client's own time over gRPC, and what shapes that change cost."""
    tensor = np.ones(LENGTH, np.float32)
    with bench.direct_client() as client, client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}) as call:
        transport = client._driver.transport = TimedTransport(client._driver.transport)  # type: ignore[assignment]
        rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
        own_us = {
            "ShmClient.infer": _own_us(transport, lambda: client.infer(MODEL, {"INPUT0": tensor}), rounds),
            "PreparedCall.infer": _own_us(transport, call.infer, rounds),
        }
    unit = "µs beside its connection's"
    figures = [Figure(f"{name}, own time, 64 B", own, unit, "", at_most=MOST_US) for name, own in own_us.items()]
    return [*figures, _other_shapes(bench)]


def _own_us(transport: TimedTransport, call: Callable[[], object], rounds: int) -> float:
    """Return the median of what a call takes, less what it waits for its connection."""
    taken = []
    for _ in range(rounds):
        transport.waited_s = 0.0
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin - transport.waited_s)
    return statistics.median(taken) * 1e6


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
