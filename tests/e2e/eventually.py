"""Waiting for what another thread is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from .flavours import AnyClient

__all__ = ["all_memory_comes_back", "eventually"]

DEADLINE_S = 40.0


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def all_memory_comes_back(client: AnyClient) -> None:
    """Return as soon as no slot is held or in doubt: a worker thread lets go of its last call only when it goes on."""
    eventually(lambda: client.stats().slots_held == 0 == client.stats().quarantined)
