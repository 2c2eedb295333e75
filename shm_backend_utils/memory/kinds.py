"""What managed regions can be made of."""

from __future__ import annotations

import enum

__all__ = ["RegionKind"]


class RegionKind(enum.Enum):
    """What a managed region is made of."""

    SYSTEM = "system"
    """POSIX shared memory: an object in ``/dev/shm``."""

    SEALED = "sealed"
    """A memfd whose size is sealed, handed over by a socket."""
