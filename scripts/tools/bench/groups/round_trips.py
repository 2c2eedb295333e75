"""What round trips on the direct path take, each over an empty request to a model without this library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import numpy as np

from shm_backend_utils.client import PreparedCall, ShmClient

from ...common.figures import Figure
from ..rounds import Bench

__all__ = ["round_trips"]

IDENTITY_BYTES: Final = {"64 B": 64, "1 MiB": 2**20, "128 MiB": 2**27, "1 GiB": 2**30}
BATCH: Final = (16, 3, 224, 224)
MOST_OF_EMPTY: Final = 1.2
MOST_OF_THE_FLOOR: Final = 1.15


def round_trips(bench: Bench) -> list[Figure]:
    """Measure them over both protocols."""
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        bare = bench.plain_client(protocol)
        stack.callback(bare.close)
        cases: dict[str, Callable[[], object]] = {
            "empty": lambda: bare.infer("empty", []),
            "bare multiply": lambda: bare.infer("bare_multiply", []),
        }
        for size, nbytes in IDENTITY_BYTES.items():
            cases[f"identity {size}"] = _prepared(stack, client, "identity", (nbytes // 4,)).infer
        multiply = _prepared(stack, client, "multiply", BATCH)
        x, y = multiply.inputs["INPUT0"], multiply.infer()["OUTPUT0"]
        cases["multiply"] = multiply.infer
        cases["the multiply alone"] = lambda: np.multiply(x, 2, out=y)  # the same work on the same memory
        medians = bench.measure(f"round trips, {protocol}", cases)
    figures = [
        medians.ratio(
            f"{protocol}: identity of {size}, in place",
            f"identity {size}",
            "empty",
            "× an empty request",
            at_most=MOST_OF_EMPTY,
        )
        for size in IDENTITY_BYTES
    ]
    # The sum takes for granted that a processor wakes up as fast after a longer wait.
    # The second floor does not: there, a model multiplies memory of its own.
    floors = {
        "× (the multiply alone + an empty request)": medians["the multiply alone"] + medians["empty"],
        "× an empty request that multiplies": medians["bare multiply"],
    }
    for unit, floor in floors.items():
        name = f"{protocol}: multiply {list(BATCH)}, in place"
        basis = f"{medians['multiply']:.3f} ms / {floor:.3f} ms"
        figures.append(Figure(name, medians["multiply"] / floor, unit, basis, at_most=MOST_OF_THE_FLOOR))
    return figures


def _prepared(stack: ExitStack, client: ShmClient, model: str, shape: tuple[int, ...]) -> PreparedCall:
    """Return a call whose input was filled in place."""
    call = stack.enter_context(client.prepare(model, {"INPUT0": (shape, np.float32)}))
    call.inputs["INPUT0"][:] = 1
    return call
