"""What it costs that a model asks the server, for every request, what the registered names in it stand for."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from shm_backend_utils.cli.common.registered_regions import registered_region
from shm_backend_utils.compat.attach import attach

from ...figures import Figure
from ..bench import Bench

__all__ = ["registered"]

BYTES: Final = 2**20
MOST_OF_TRUSTED: Final = 1.15
OUTPUT_IN: Final = ("one region", "two regions")
CASES: Final = {"trusted": "trusting_identity", "checked": "identity"}


def registered(bench: Bench) -> list[Figure]:
    """Measure an identity by :func:`attach`, over both protocols, with both tensors in one region or in two."""
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    with ExitStack() as stack:
        client = bench.plain_client(protocol)
        stack.callback(client.close)
        first, second = (_region(stack, client) for _ in range(2))
        cases: dict[str, Callable[[], object]] = {}
        for words, output in zip(OUTPUT_IN, (first, second), strict=True):
            for case, model in CASES.items():
                cases[f"{case}, {words}"] = partial(client.infer, model, **_attached(protocol, model, first, output))
        medians = bench.measure(f"registered names, {protocol}", cases)
    return [
        medians.ratio(
            f"{protocol}: identity of 1 MiB by attach, {words}, names checked",
            f"checked, {words}",
            f"trusted, {words}",
            "× names trusted",
            at_most=MOST_OF_TRUSTED,
        )
        for words in OUTPUT_IN
    ]


def _region(stack: ExitStack, client: Any) -> str:
    """Make and register a region with room for both tensors; return its name."""
    region = registered_region(stack, client, f"bench-{secrets.token_hex(8)}", 2 * BYTES)
    shared_memory.set_shared_memory_region(region.handle, [np.ones(BYTES // 2, np.float32)])
    return region.name


def _attached(protocol: str, model: str, source: str, target: str) -> Any:
    module: Any = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    x = module.InferInput("INPUT0", [BYTES // 4], "FP32")
    x.set_shared_memory(source, BYTES)
    y = module.InferRequestedOutput("OUTPUT0")
    y.set_shared_memory(target, BYTES, BYTES)
    return attach(model, [x], [y])
