"""Whether anything grows when slots are taken and released: descriptors, mappings, shared memory, memory."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Final

import numpy as np

from shm_backend_utils.client import Result, ShmClient

from ...common.figures import Figure
from ..rounds import Bench

__all__ = ["slots"]

SLOTS: Final = 1000
LIMITS: Final = {
    "descriptors": 0.0,
    "mappings of /dev/shm": 0.0,
    "objects in /dev/shm": 0.0,
    "resident MiB": 1.0,
}
TENSOR: Final = np.ones(16, np.float32)

Held = dict[str, float]


def slots(bench: Bench) -> list[Figure]:
    """Take slots and release them: by a client that goes on, and by one that is closed then."""
    with ShmClient(bench.server.grpc_url) as client:
        _take_and_release(bench, client)
        before_release = _held()
        _take_and_release(bench, client)
        after_release = _held()
    before_close = _held()
    with ShmClient(bench.server.grpc_url) as client:
        _take_and_release(bench, client)
    return [
        *_growth("taken and released", before_release, after_release),
        *_growth("taken, released and removed", before_close, _held()),
    ]


def _take_and_release(bench: Bench, client: ShmClient) -> None:
    held: list[Result] = []
    for _ in bench.shown(f"{SLOTS:,} slots", SLOTS):
        held.append(client.infer("identity", {"INPUT0": TENSOR}))
    if client.stats().slots_held != SLOTS:
        raise AssertionError(f"{client.stats().slots_held} slots are held, not {SLOTS}")


def _growth(how: str, before: Held, after: Held) -> list[Figure]:
    return [
        Figure(
            f"{SLOTS:,} slots {how}: {what}",
            after[what] - before[what],
            "more than before",
            f"{after[what]:,.6g} - {before[what]:,.6g}",
            at_most=limit,
        )
        for what, limit in LIMITS.items()
    ]


def _held() -> Held:
    """Return what this process holds now."""
    gc.collect()  # what only waits for the collector is not held
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text().splitlines()  # other threads' come and go
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # a count is all we need
        "mappings of /dev/shm": sum("/dev/shm/" in line for line in mappings),
        "objects in /dev/shm": len(list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*"))),
        "resident MiB": resident_pages * resource.getpagesize() / 2**20,
    }
