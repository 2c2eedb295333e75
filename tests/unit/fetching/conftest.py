"""Every test here leaves as many descriptors open as there were, and no thread at work."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.handover.fetching import Fetcher

ENOUGH_S = 30.0
PATIENCE_S = 5.0


@pytest.fixture(autouse=True)
def _leaves_descriptors_level() -> Iterator[None]:
    before = count_open()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while count_open() != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.002)  # the closer has a thread of its own
    assert count_open() == before


@pytest.fixture
def fetcher() -> Fetcher:
    """One that waits for as long as a slow machine needs."""
    return Fetcher(ENOUGH_S)


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
