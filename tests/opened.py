"""Memory of other processes, opened as a model opens it."""

from __future__ import annotations

from typing import Final

from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.protocol.handover import parse_sealed_key

_BOUND_S: Final = 10.0


def open_region(key: str, token: str, field: str = "region") -> ManagedRegion:
    """Map a region of any kind that somebody else made; ``field`` is what messages call it."""
    sealed = parse_sealed_key(key)
    if sealed is None:
        with SharedFile.open(key, field) as file:
            return ManagedRegion.map(file, token)
    with Fetcher(_BOUND_S).fetch(sealed, token, field, lambda uid: True) as file:
        return ManagedRegion.map(file, token)


def open_segment(key: str, byte_size: int, field: str) -> SystemSegment:
    """Map an object in ``/dev/shm`` as a whole, by its name without slashes."""
    with SharedFile.open(key, field) as file:
        return SystemSegment.map_part(file, 0, byte_size)
