"""Waiting for what another thread is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from .flavours import AnyClient

__all__ = ["all_memory_comes_back", "eventually"]

DEADLINE_S = 40.0

T = TypeVar("T")


def eventually(look: Callable[[], T | None]) -> T:
    """Return what is found as soon as there is something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def all_memory_comes_back(client: AnyClient) -> None:
    """Return as soon as no slot is held or in doubt: a worker thread lets go of its last call only when it goes on."""
    eventually(lambda: client.stats().slots_held == 0 == client.stats().quarantined)
