"""How many requests a model harness serves in a second, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from shm_backend_utils.cli.common.server import REPOSITORY
from shm_backend_utils.client import ShmClient
from shm_backend_utils.testing.harness import ModelHarness

from ...figures import Figure
from ..bench import Bench

LEAST_REQUESTS: Final = 5_000
_MODEL: Final = REPOSITORY / "identity"
_REQUESTS: Final = 5_000
_ROUNDS: Final = 5


def harness(bench: Bench) -> list[Figure]:
    """Count the requests of a thread that calls the sample model ``identity``, with its session, by ``infer``."""
    del bench  # there is no server to measure against
    inputs = {"INPUT0": np.arange(4, dtype=np.float32)}
    with ModelHarness(_MODEL) as model:
        alone = max(_rate(lambda: model.infer(inputs)) for _ in range(_ROUNDS))
        with ShmClient(model, inline_bytes=0) as client:
            outputs = {"OUTPUT0": inputs["INPUT0"].nbytes}
            direct = max(
                _rate(lambda: client.infer("identity", inputs, outputs=outputs).release()) for _ in range(_ROUNDS)
            )
    basis = f"best of {_ROUNDS} times {_REQUESTS}, one thread"
    return [
        Figure("ModelHarness.infer, with a session", alone, "requests / s", basis, at_least=LEAST_REQUESTS),
        Figure("ShmClient of a harness, direct", direct, "requests / s", basis),
    ]


def _rate(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_REQUESTS):
        work()
    return round(_REQUESTS / (time.perf_counter() - started))
