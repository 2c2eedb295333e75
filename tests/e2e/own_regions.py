"""The regions of this process, whatever they are made of, and how they are lost."""

from __future__ import annotations

import gc
from pathlib import Path

from shm_backend_utils.memory.segment import MappedSegment, SealedSegment, SystemSegment

__all__ = ["give_another_token", "lose", "own_regions"]

_TOKEN = slice(24, 40)  # where it lies in a region's header


def own_regions() -> list[MappedSegment]:
    """Return those that are mapped and not removed, of what the running test has made."""
    kinds = (SealedSegment, SystemSegment)
    made = [each for each in gc.get_objects() if issubclass(type(each), kinds) and each._maker]
    return [each for each in made if not each.is_closed and not each.is_unlinked]


def lose(region: MappedSegment) -> None:
    """Have nobody find it any more, and models see that; the client that has made it is not told."""
    if isinstance(region, SealedSegment):
        region.unlink()
    else:
        (Path("/dev/shm") / region.key).unlink()


def give_another_token(region: MappedSegment) -> None:
    region.buffer()[_TOKEN] = bytes(16)
