"""Measure this recipe beside plain tritonclient and a stock model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from examples.measuring import compare, report, request_ways, served
from examples.pytorch.client import SHAPE


def measure(url: str, rounds: int) -> dict[str, float]:
    """Return the median of each way, in milliseconds."""
    logits = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    with ExitStack() as stack:
        ways = request_ways(stack, url, "probabilities", {"LOGITS": logits}, ("PROBABILITIES", logits.nbytes))
        return compare(ways, rounds)


if __name__ == "__main__":
    with served(Path(__file__).parent) as url:
        report(measure(url, 30))
