"""A run's curves, as they look: all of them, or those of a short run where triton-shm-client is not installed."""

from __future__ import annotations

import pytest

from scripts.tools.bench.runs import Curves
from scripts.tools.bench.ways import OTHER_CLIENT, OVER_THE_WIRE, WAYS

MACHINE = {
    "date": "2026-11-23",
    "processor": "AMD EPYC 9354P 32-Core Processor",
    "cores": "64",
    "Python": "3.11.7",
    "NumPy": "2.4.6",
    "Triton": "2.51.0",
}
FLAT = ("in place", "empty")


def full_run() -> Curves:
    """Each line over its whole range, some of them all but on top of one another."""
    curves = Curves()
    for protocol in ("grpc", "http"):
        for number, name in enumerate(WAYS):
            for size in (4**exponent for exponent in range(3, 16)):
                if (protocol == "http" and name == OTHER_CLIENT) or (name in OVER_THE_WIRE and size > 2**28):
                    continue
                slope = 0 if name in FLAT else size / 2**20 * (3 if name in OVER_THE_WIRE else 1)
                curves.add("latency", protocol, name, size, 0.6 + 0.05 * number + slope)
    for who in ("threads", "tasks"):
        for size in (2**14, 2**20):
            for number, name in enumerate(("ours", "stock", "stock triton shm")):
                for callers in (1, 4, 16, 64):
                    curves.add(
                        "concurrency", f"{who}, {size} bytes", name, callers, 12_345.6 / (1 + number) / callers**0.2
                    )
    for kind in ("repeated", "varying"):
        for number, name in enumerate(("direct", "stock in band", "stock triton shm", OTHER_CLIENT)):
            for size in (2**12, 2**16, 2**20):
                curves.add("shapes", kind, name, size, (1 + number) * size / 2**12)
    return curves


def short_run() -> Curves:
    """One size, one protocol, one number of callers, and nothing by triton-shm-client."""
    curves = Curves()
    for name in ("in place", "empty"):
        curves.add("latency", "grpc", name, 64, 0.7)
    curves.add("concurrency", "threads, 16384 bytes", "ours", 1, 1234.5)
    for kind in ("repeated", "varying"):
        curves.add("shapes", kind, "direct", 4096, 0.8)
    return curves


RUNS = {"a full run": full_run, "a short run": short_run}
runs = pytest.mark.parametrize("run", RUNS)
