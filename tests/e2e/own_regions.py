"""The regions of this process, whatever they are made of, what lies in them, and how they are lost."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy.typing as npt

from shm_backend_utils.memory.segment import MappedSegment, SealedSegment, SystemSegment


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


def lies_in_shared_memory(array: npt.NDArray[Any]) -> bool:
    """Return whether a file of /dev/shm, or sealed memory, is at the addresses of the array."""
    begin = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= begin and begin + array.nbytes <= high:
            return name.startswith(("/dev/shm/", "/memfd:shmbu "))
    return False
