"""The time of round trips: on the direct path beside empty requests, and on every path over the size of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from shm_backend_utils.client import PreparedCall, ShmClient
from shm_backend_utils.memory.machine import available_bytes
from shm_backend_utils.memory.shared_file import total_bytes

from ...figures import Figure, in_words
from ..bench import TRITON, Bench
from ..ways import WAYS, Way

BATCH: Final = (16, 3, 224, 224)


def round_trips(bench: Bench) -> list[Figure]:
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    figures = []
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        transport = client._driver.transport
        bare = stack.enter_context(bench.plain_client(protocol))
        for byte_size in (64, 2**20, 2**27, 2**30):
            identity: dict[str, Callable[[], object]] = {
                "identity": _prepared(stack, client, "identity", (byte_size // 4,)).infer,
                "empty": lambda: bare.infer("empty", []),
                "own empty": lambda: transport.send(transport.codec.infer("empty", {}), 60.0),
            }
            size, unit = in_words(byte_size), "× an empty request of"
            medians = bench.measure(f"identity of {size}, {protocol}", identity)
            name = f"{protocol}: identity of {size}, in place"
            figures += [
                medians.ratio(name, "identity", "empty", f"{unit} tritonclient's", at_most=1.0),
                medians.ratio(name, "identity", "own empty", f"{unit} ours", at_most=1.25),
            ]
        batch_size = TRITON[protocol].InferInput("SHM", [BATCH[0], 0], "UINT8")
        batch_size.set_data_from_numpy(np.empty((BATCH[0], 0), np.uint8))
        multiply: dict[str, Callable[[], object]] = {
            "bare": lambda: bare.infer("bare_multiply", [batch_size]),
            "bare, tmpfs": lambda: bare.infer("bare_multiply_tmpfs", [batch_size]),
            "multiply": _prepared(stack, client, "multiply", BATCH).infer,
        }
        medians, name = bench.measure(f"×2, {protocol}", multiply), f"{protocol}: ×2 on {list(BATCH)}, in place"
    unit = "× an empty request whose model multiplies its own memory"
    of_tmpfs = "× the same, whose own memory is of tmpfs, in pages of 4 KiB"
    return [
        *figures,
        medians.ratio(name, "multiply", "bare", unit, at_most=1.1),
        medians.ratio(name, "multiply", "bare, tmpfs", of_tmpfs),
    ]


def _prepared(stack: ExitStack, client: ShmClient, model: str, shape: tuple[int, ...]) -> PreparedCall:
    """Return a call whose input was filled in place."""
    call = stack.enter_context(client.prepare(model, {"INPUT0": (shape, np.float32)}))
    call.inputs["INPUT0"][:] = 1
    return call


PICTURE: Final = "latency"
LEAST_ROUNDS: Final = 5


def latency(bench: Bench) -> list[Figure]:
    """Measure what the picture shows, 64 B to 1 GiB; it is held to no limit."""
    # Client, server and models have up to 8 copies of a tensor, on the worst path.
    most_bytes = min(bench.amounts.largest_bytes, available_bytes() / 8, total_bytes() / 8)
    for protocol in bench.urls:
        for byte_size in (4**exponent for exponent in range(3, 16)):
            if byte_size <= most_bytes:
                _measure(bench, protocol, byte_size)
    return []


def _measure(bench: Bench, protocol: str, byte_size: int) -> None:
    # In band, 64 MiB take half a second and more already, and 2 GiB are more than a message of gRPC holds.
    ways = {name: way for name, way in WAYS.items() if byte_size <= 2**26 or name != "stock"}
    # The ways take turns while there is room for the memory of all.
    parts = [ways] if byte_size <= 2**24 else [{name: way} for name, way in ways.items()]
    for part in parts:
        for name, milliseconds in _medians(bench, protocol, byte_size, part).items():
            bench.add_point(PICTURE, protocol, name, byte_size, milliseconds)


def _medians(bench: Bench, protocol: str, byte_size: int, ways: dict[str, Way]) -> dict[str, float]:
    x = np.ones(byte_size // 4, np.float32)
    most = max(bench.amounts.rounds // 5, LEAST_ROUNDS)
    rounds = min(most, max(LEAST_ROUNDS, 2**27 // byte_size))
    with ExitStack() as stack:
        cases = {name: partial(stack.enter_context(way(bench, protocol, byte_size)), x) for name, way in ways.items()}
        what = f"{PICTURE}, {protocol}, {byte_size:,} bytes: {', '.join(ways) if len(ways) == 1 else 'all ways'}"
        # In the first rounds the server takes memory for itself.
        return bench.measure(what, cases, rounds, warm_up_rounds=3)
