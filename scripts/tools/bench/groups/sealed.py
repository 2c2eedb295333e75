"""What sealed memory costs over memory in ``/dev/shm``: the first request in a new region, and those that follow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from shm_backend_utils.cli.common.rounds import Times, shuffled
from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName

from ...figures import Figure
from ..bench import Bench, Cases

__all__ = ["sealed"]

SIZES: Final = {"4 KiB": 2**12, "16 MiB": 2**24}
REGIONS: Final[tuple[RegionName, ...]] = ("system", "sealed")
MOST_MS_MORE: Final = 3.0
MOST_OF_SYSTEM: Final = 1.05
WARM_UP_ROUNDS: Final = 3


def sealed(bench: Bench) -> list[Figure]:
    """Measure both over both protocols."""
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    with ExitStack() as stack:
        clients: dict[str, ShmClient] = {
            region: stack.enter_context(
                ShmClient(bench.urls[protocol], path="direct", inline_bytes=0, pool=PoolOptions(region=region))
            )
            for region in REGIONS
        }
        return [
            figure
            for size, byte_size in SIZES.items()
            for figure in _of_size(bench, f"{protocol}: infer of {size}", byte_size, clients)
        ]


def _of_size(bench: Bench, what: str, byte_size: int, clients: dict[str, ShmClient]) -> list[Figure]:
    x = np.ones(byte_size // 4, np.float32)
    cases: dict[str, Callable[[], object]] = {
        region: functools.partial(_infer, client, x) for region, client in clients.items()
    }
    first = _measure_first(bench, f"{what}, first", clients, cases)
    warm = bench.measure(f"{what}, warm", cases)
    return [
        Figure(
            f"{what}, the first in a new sealed region",
            first["sealed"] - first["system"],
            "ms more than in a new region of /dev/shm",
            f"{first['sealed']:.3f} ms - {first['system']:.3f} ms",
            at_most=MOST_MS_MORE,
        ),
        warm.ratio(
            f"{what}, in a sealed region that the model knows",
            "sealed",
            "system",
            "× in one of /dev/shm",
            at_most=MOST_OF_SYSTEM,
        ),
    ]


def _measure_first(bench: Bench, what: str, clients: dict[str, ShmClient], cases: Cases) -> dict[str, float]:
    """Measure requests before which the client has given up all its regions. It has tried the model before."""
    for case in cases.values():
        case()
    times = Times(REGIONS)
    for number in bench.rounds_with_warm_up(what, bench.amounts.slow_rounds, WARM_UP_ROUNDS):
        for region in shuffled(REGIONS, number):
            clients[region]._memory.pool.drop_idle()
            begin = time.perf_counter()
            cases[region]()
            times.add(region, number, begin)
    return times.medians()


def _infer(client: ShmClient, x: np.ndarray[Any, Any]) -> None:
    client.infer("identity", {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}).release()
