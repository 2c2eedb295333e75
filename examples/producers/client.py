"""Several processes, each with a client and memory of its own, send windows of samples to one model."""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import NamedTuple

import numpy as np

from shm_backend_utils.client import ShmClient

SHAPE = (64, 16384)  # sensors, samples of each
PRODUCERS = 4
WINDOWS = 100  # of each producer


class Produced(NamedTuple):
    """What one producer did, and when, by the machine's monotonic clock."""

    began: float
    ended: float
    windows: int
    highest: float


def produce(url: str, number: int, windows: int) -> Produced:
    """Send windows; one producer does, in its process."""
    with ShmClient(url) as client, client.prepare("window_statistics", {"WINDOW": (SHAPE, np.float32)}) as call:
        highest = 0.0
        began = time.monotonic()
        for index in range(windows):
            call.inputs["WINDOW"].fill(number + index / windows)  # a sensor would write here
            with call.infer() as result:
                highest = max(highest, float(result["MAX"].max()))
        return Produced(began, time.monotonic(), windows, highest)


def run(url: str, producers: int = PRODUCERS, windows: int = WINDOWS) -> list[Produced]:
    """Run producers side by side."""
    # Spawned, not forked: a client belongs to the process that made it, and gRPC's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(producers) as pool:
        return pool.starmap(produce, [(url, number, windows) for number in range(producers)], chunksize=1)


def rate(produced: list[Produced]) -> float:
    """Return how many windows a second there were, of all producers together."""
    seconds = max(each.ended for each in produced) - min(each.began for each in produced)
    return sum(each.windows for each in produced) / seconds


if __name__ == "__main__":
    done = run(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001")
    print(
        f"{len(done)} producers, {rate(done):.0f} windows a second, the highest value is {max(e.highest for e in done)}"
    )
