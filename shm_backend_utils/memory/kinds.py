"""The kinds of managed regions."""

from __future__ import annotations

import enum

__all__ = ["RegionKind"]


class RegionKind(enum.Enum):
    """The kind of a managed region."""

    SYSTEM = "system"
    """POSIX shared memory: an object in ``/dev/shm``."""

    SEALED = "sealed"
    """A memfd whose size is sealed, handed over by a socket."""
