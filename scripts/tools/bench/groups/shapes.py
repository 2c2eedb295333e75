"""The picture of varying shapes: the same tensors again and again, beside tensors of which each has another length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

from ...figures import Figure
from ..bench import Bench
from ..other_client import OTHER_CLIENT
from ..payloads import Floats, endless, repeated, varying
from ..ways import Send, ways_of

__all__ = ["shapes"]

PICTURE: Final = "shapes"
BYTES: Final = (2**12, 2**16, 2**20)
LINES: Final = ("direct", "stock in band", "stock triton shm", OTHER_CLIENT)
"""The ways that can send them; what is prepared has one shape."""
ROUNDS_SHARE: Final = 2
KINDS: Final = {"repeated": repeated, "varying": varying}
MORE: Final = 2
"""How much room the peers' regions have, over the middle size: the largest array is half as large again."""


def shapes(bench: Bench) -> list[Figure]:
    """Measure them over gRPC; there is nothing that they are held to here."""
    for byte_size in BYTES:
        with ExitStack() as stack:
            sends = {
                name: stack.enter_context(way(bench, "grpc", MORE * byte_size))
                for name, way in ways_of("grpc").items()
                if name in LINES
            }
            given = {kind: arrays(byte_size) for kind, arrays in KINDS.items()}
            cases = {
                (kind, name): partial(_send_next, send, endless(given[kind]))
                for kind in KINDS
                for name, send in sends.items()
            }
            named = {f"{name}, {kind}": case for (kind, name), case in cases.items()}
            medians = bench.measure(
                f"{PICTURE}, around {byte_size:,} bytes", named, max(bench.amounts.rounds // ROUNDS_SHARE, 1)
            )
        for kind, name in cases:
            bench.curves.add(PICTURE, kind, name, byte_size, medians[f"{name}, {kind}"])
    return []


def _send_next(send: Send, given: Iterator[Floats]) -> None:
    send(next(given))
