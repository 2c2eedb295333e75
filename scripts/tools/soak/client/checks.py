"""What a client of the soak sends, what must come back, and whether it did."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["WORKLOADS", "HeldViews", "Noise", "Workload", "is_right"]

SMALLEST_BYTES: Final = 64
LARGEST_BYTES: Final = 4 << 20
IMAGE_SHAPE: Final = (3, 224, 224)
MOST_IMAGES: Final = 4

Array = npt.NDArray[Any]


class Noise:
    """Random words, made once; payloads are slices of them, which costs nothing."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        generator = np.random.default_rng(seed)
        self._words = generator.integers(0, 1 << 32, LARGEST_BYTES // 2, dtype=np.uint32)
        self._numbers = generator.random(2 * MOST_IMAGES * math.prod(IMAGE_SHAPE), np.float32)

    def words(self) -> npt.NDArray[np.uint32]:
        """Return 64 bytes to a few MiB, every magnitude as likely as any other."""
        nbytes = math.exp(self._random.uniform(math.log(SMALLEST_BYTES), math.log(LARGEST_BYTES)))
        return self._slice(self._words, int(nbytes) // 4)

    def images(self) -> npt.NDArray[np.float32]:
        """Return a batch of numbers without a NaN, so that arithmetic has one right result."""
        count = self._random.randint(1, MOST_IMAGES)
        return self._slice(self._numbers, count * math.prod(IMAGE_SHAPE)).reshape(count, *IMAGE_SHAPE)

    def like(self, payload: Array) -> Array:
        """Return another payload of the same shape and dtype."""
        source: Array = self._numbers if payload.ndim > 1 else self._words
        return np.asarray(self._slice(source, payload.size).view(payload.dtype).reshape(payload.shape))

    def _slice(self, source: Array, length: int) -> Array:
        begin = self._random.randrange(len(source) - length)
        return source[begin : begin + length]


@dataclass(frozen=True)
class Workload:
    """One model and what it does to its input."""

    model: str
    source: str
    sink: str

    def payload(self, noise: Noise) -> Array:
        """Return an input."""
        if self.model == "multiply":
            return noise.images()
        payload: Array = noise.words()
        return payload if self.model == "halves" else payload.view(np.float32)

    def expected(self, payload: Array) -> Array:
        """Return what the model makes of an input."""
        if self.model == "multiply":
            return np.asarray(payload * np.float32(2))
        return np.invert(payload) if self.model == "halves" else payload

    def parameters(self, sleep_ms: int) -> dict[str, int] | None:
        """Return the parameters of a request to a model that is to sleep, if it can."""
        return {"sleep_ms": sleep_ms} if self.model == "halves" else None


WORKLOADS: Final = {
    workload.model: workload
    for workload in (
        Workload("identity", "INPUT0", "OUTPUT0"),
        Workload("multiply", "INPUT0", "OUTPUT0"),
        Workload("halves", "X", "Y"),
    )
}


def is_right(result: Array, expected: Array) -> bool:
    """Return whether two arrays are the same to the byte: NaNs are compared like everything else."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
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
