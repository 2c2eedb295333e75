"""Whether a result is right, and stays so for as long as somebody looks at it."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HeldViews", "is_right"]

Array = npt.NDArray[Any]


def is_right(result: Array, expected: Array) -> bool:
    """Return whether two arrays are the same to the byte: NaNs are compared like everything else."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    if result.dtype.hasobject:
        return bool(result.tolist() == expected.tolist())
    return bool(np.array_equal(_bytes(result), _bytes(expected)))


class HeldViews:
    """Results that are kept over further calls: their memory must not change as long as somebody looks at it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[tuple[Array, int, int]] = []

    def hold(self, view: Array, call_count: int) -> None:
        """Keep a result for this many calls."""
        if len(self._held) < self._limit:
            self._held.append((view, _checksum(view), call_count))

    def pass_call(self) -> int:
        """Count one more call; return how many of the views whose time is up have changed, and drop these."""
        counted = [(view, checksum, left - 1) for view, checksum, left in self._held]
        self._held = [held for held in counted if held[2] > 0]
        return sum(_checksum(view) != checksum for view, checksum, left in counted if left <= 0)

    def drop(self) -> int:
        """Drop every view; return how many had changed."""
        changed = sum(_checksum(view) != checksum for view, checksum, _ in self._held)
        self._held = []
        return changed


def _checksum(array: Array) -> int:
    return zlib.crc32(_bytes(array).data)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
