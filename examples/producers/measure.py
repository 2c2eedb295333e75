"""Measure this recipe beside the same producers with plain tritonclient and a stock model."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from examples.measuring import PLAIN, RECIPE, plain_infer, report, served
from examples.producers.client import PRODUCERS, SHAPE, WINDOWS, Produced, rate, run


def produce_plainly(url: str, number: int, windows: int) -> Produced:
    """Send windows; one producer does, in its process."""
    window = np.empty(SHAPE, np.float32)
    with triton.InferenceServerClient(url) as client:
        highest = 0.0
        began = time.monotonic()
        for index in range(windows):
            window.fill(number + index / windows)
            highest = max(
                highest, float(plain_infer(client, "window_statistics_stock", {"WINDOW": window}, "MAX").max())
            )
        return Produced(began, time.monotonic(), windows, highest)


def run_plainly(url: str, producers: int, windows: int) -> list[Produced]:
    """Run producers side by side."""
    with multiprocessing.get_context("spawn").Pool(producers) as pool:
        return pool.starmap(produce_plainly, [(url, number, windows) for number in range(producers)], chunksize=1)


def measure(url: str, rounds: int, producers: int = PRODUCERS, windows: int = WINDOWS) -> dict[str, float]:
    """Return the median of each way, in milliseconds for a window, all producers together."""
    milliseconds: dict[str, list[float]] = {RECIPE: [], PLAIN: []}
    for _ in range(rounds):
        done, plain = run(url, producers, windows), run_plainly(url, producers, windows)
        assert [each.highest for each in done] == [each.highest for each in plain]
        milliseconds[RECIPE].append(1e3 / rate(done))
        milliseconds[PLAIN].append(1e3 / rate(plain))
    return {name: statistics.median(values) for name, values in milliseconds.items()}


if __name__ == "__main__":
    with served(Path(__file__).parent) as url:
        report(measure(url, 3), "ms for a window, all producers together")
