"""Whether the direct path is the fastest way for small tensors, too: `infer` on each path, of the same client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Bench
from ..payloads import endless, repeated

__all__ = ["sizes"]

BYTES: Final = {"64 B": 64, "1 KiB": 2**10, "4 KiB": 2**12, "16 KiB": 2**14, "64 KiB": 2**16}
MODEL: Final = "identity"
MOST_OF_IN_BAND: Final = 1.0
ROUNDS_PER_ROUND: Final = 5


def sizes(bench: Bench) -> list[Figure]:
    """Measure identities on the direct path over the same in band, for both protocols."""
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    figures = []
    with ShmClient(bench.urls[protocol]) as client:
        for size, byte_size in BYTES.items():
            cases: dict[str, Callable[[], object]] = {
                path: partial(_infer, client, path, endless(repeated(byte_size))) for path in ("direct", "inline")
            }
            name = f"{protocol}: infer of {size}"
            medians = bench.measure(name, cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
            figures.append(medians.ratio(name, "direct", "inline", "× the same in band", at_most=MOST_OF_IN_BAND))
    return figures


def _infer(client: ShmClient, path: Any, given: Any) -> float:
    x = next(given)
    with client.infer(MODEL, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}, path=path) as result:
        return float(result["OUTPUT0"][-1])
