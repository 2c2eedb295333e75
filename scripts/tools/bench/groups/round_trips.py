"""What round trips on the direct path take, beside empty requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import numpy as np
import tritonclient.grpc
import tritonclient.http

from shm_backend_utils.client import PreparedCall, ShmClient

from ...figures import Figure, in_words
from ..bench import Bench

IDENTITY_BYTES: Final = (64, 2**20, 2**27, 2**30)
BATCH: Final = (16, 3, 224, 224)
TIMEOUT_S: Final = 60.0
MOST_OF_EMPTY: Final = 1.0
MOST_OF_OWN_EMPTY: Final = 1.25
MOST_OF_EMPTY_THAT_MULTIPLIES: Final = 1.1


def round_trips(bench: Bench) -> list[Figure]:
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        transport = client._driver.transport
        bare = stack.enter_context(bench.plain_client(protocol))
        batch_size = (tritonclient.grpc if protocol == "grpc" else tritonclient.http).InferInput(
            "SHM", [BATCH[0], 0], "UINT8"
        )
        batch_size.set_data_from_numpy(np.empty((BATCH[0], 0), np.uint8))
        identities = {}
        for byte_size in IDENTITY_BYTES:
            cases: dict[str, Callable[[], object]] = {
                "identity": _prepared(stack, client, "identity", (byte_size // 4,)).infer,
                "empty": lambda: bare.infer("empty", []),
                "own empty": lambda: transport.send(transport.codec.infer("empty", {}), TIMEOUT_S),
            }
            size = in_words(byte_size)
            identities[size] = bench.measure(f"identity of {size}, {protocol}", cases)
        multiply: dict[str, Callable[[], object]] = {
            "bare multiply": lambda: bare.infer("bare_multiply", [batch_size]),
            "bare multiply, tmpfs": lambda: bare.infer("bare_multiply_tmpfs", [batch_size]),
            "multiply": _prepared(stack, client, "multiply", BATCH).infer,
        }
        multiply_medians = bench.measure(f"×2, {protocol}", multiply)
    figures = []
    for size, medians in identities.items():
        name = f"{protocol}: identity of {size}, in place"
        unit = "× an empty request of tritonclient's"
        figures += [
            medians.ratio(name, "identity", "empty", unit, at_most=MOST_OF_EMPTY),
            medians.ratio(name, "identity", "own empty", "× an empty request of ours", at_most=MOST_OF_OWN_EMPTY),
        ]
    name, unit = (
        f"{protocol}: ×2 on {list(BATCH)}, in place",
        "× an empty request whose model multiplies its own memory",
    )
    of_tmpfs = "× the same, whose own memory is of tmpfs, in pages of 4 KiB"
    return [
        *figures,
        multiply_medians.ratio(name, "multiply", "bare multiply", unit, at_most=MOST_OF_EMPTY_THAT_MULTIPLIES),
        multiply_medians.ratio(name, "multiply", "bare multiply, tmpfs", of_tmpfs),
    ]


def _prepared(stack: ExitStack, client: ShmClient, model: str, shape: tuple[int, ...]) -> PreparedCall:
    """Return a call whose input was filled in place."""
    call = stack.enter_context(client.prepare(model, {"INPUT0": (shape, np.float32)}))
    call.inputs["INPUT0"][:] = 1
    return call
