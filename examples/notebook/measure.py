"""Measure this recipe beside plain tritonclient and a stock model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from examples.measuring import compare, report, request_ways, served


def measure(url: str, rounds: int) -> dict[str, float]:
    """Return the median of each way, in milliseconds."""
    picture = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), np.uint8)
    with ExitStack() as stack:
        ways = request_ways(stack, url, "brighten", {"PICTURE": picture}, ("BRIGHTENED", picture.nbytes))
        return compare(ways, rounds)


if __name__ == "__main__":
    with served(Path(__file__).parent) as url:
        report(measure(url, 30))
