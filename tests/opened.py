"""Managed regions of other processes, opened as a model opens them."""

from __future__ import annotations

import contextlib
from typing import Final

from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.handover import parse_sealed_key

__all__ = ["open_region"]

_BOUND_S: Final = 10.0


def open_region(key: str, token: str, field: str = "region") -> ManagedRegion:
    """Map a region of any kind that somebody else made; ``field`` is what messages call it."""
    sealed = parse_sealed_key(key)
    if sealed is None:
        return ManagedRegion.open(key, token, field)
    with (
        contextlib.closing(Fetcher(_BOUND_S)) as fetcher,
        fetcher.fetch(sealed, token, field, lambda uid: True) as file,
    ):
        return ManagedRegion.map(file, token)
