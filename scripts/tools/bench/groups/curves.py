"""Latency over the size of a tensor, which a picture shows and nothing is held to.

What a limit is for, other groups measure in more rounds and with nothing else between. Here all lines take turns, up
to :data:`TOGETHER`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from shm_backend_utils.memory.machine import available_bytes
from shm_backend_utils.memory.shared_file import total_bytes

from ...figures import Figure
from ..bench import Bench
from ..ways import OVER_THE_WIRE, Way, ways_of

PICTURE: Final = "latency"
BYTES: Final = tuple(4**exponent for exponent in range(3, 16))
"""64 B to 1 GiB."""
MOST_OVER_THE_WIRE: Final = 2**26
"""A call with so much takes half a second and more already, and 2 GiB are more than a message of gRPC holds."""
TOGETHER: Final = 2**24
"""Up to here all ways have their memory at once, and take turns. Larger tensors have it one way after another."""
BYTES_PER_CASE: Final = 2**27
"""How much each way sends of a size, or in its least number of rounds, if that is more."""
LEAST_ROUNDS: Final = 5
WARM_UP_ROUNDS: Final = 3
"""In the first rounds the server takes memory for itself."""
ROUNDS_SHARE: Final = 5
MEMORY: Final = 8
"""How many times a tensor's size there must be of memory: client's, server's and models' copies, on the worst path."""


def latency(bench: Bench) -> list[Figure]:
    """Measure round trips on every path, every peer and an empty request, over both protocols."""
    most_bytes = min(bench.amounts.largest_bytes, available_bytes() / MEMORY, total_bytes() / MEMORY)
    for protocol in bench.urls:
        for byte_size in BYTES:
            if byte_size <= most_bytes:
                _measure(bench, protocol, byte_size)
    return []


def _measure(bench: Bench, protocol: str, byte_size: int) -> None:
    ways = {
        name: way
        for name, way in ways_of(protocol).items()
        if byte_size <= MOST_OVER_THE_WIRE or name not in OVER_THE_WIRE
    }
    parts = [ways] if byte_size <= TOGETHER else [{name: way} for name, way in ways.items()]
    for part in parts:
        for name, milliseconds in _medians(bench, protocol, byte_size, part).items():
            bench.curves.add(PICTURE, protocol, name, byte_size, milliseconds)


def _medians(bench: Bench, protocol: str, byte_size: int, ways: dict[str, Way]) -> dict[str, float]:
    x = np.ones(byte_size // 4, np.float32)
    most = max(bench.amounts.rounds // ROUNDS_SHARE, LEAST_ROUNDS)
    rounds = min(most, max(LEAST_ROUNDS, BYTES_PER_CASE // byte_size))
    with ExitStack() as stack:
        cases = {name: partial(stack.enter_context(way(bench, protocol, byte_size)), x) for name, way in ways.items()}
        what = f"{PICTURE}, {protocol}, {byte_size:,} bytes: {', '.join(ways) if len(ways) == 1 else 'all ways'}"
        return bench.measure(what, cases, rounds, warm_up_rounds=WARM_UP_ROUNDS)
