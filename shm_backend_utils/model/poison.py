"""Random bytes that memory is filled with, so that it shows later which of it was not written."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Poison", "fill_with_noise"]

_PIECE: Final = 1 << 20  # bytes
_FALSE_ALARM: Final = 1e-6
_WORDS: Final = {2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = npt.NDArray[np.uint8]


class Poison:
    """Memory that is full of random bytes, of which nothing but the seed is kept."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._seed = fill_with_noise(data)

    def left(self, item_size: int) -> int:
        """Return how many elements of so many bytes are as they were filled; 0 if that may be by chance.

        What was written is by chance what it was before, for each byte of an element once in 256. More of that than
        comes once in a million outputs is no chance: one element of 4 bytes and more, unless there are thousands of
        them; of ten bytes four, and of 100,000 some 500.
        """
        if not self._data.nbytes:
            return 0
        words = _WORDS.get(item_size, np.uint8)
        pieces = _with_noise(self._data, self._seed)
        count = sum(int(np.count_nonzero(piece.view(words) == noise.view(words))) for piece, noise in pieces)
        size = np.dtype(words).itemsize
        return count if count >= _least_that_tells(self._data.nbytes / size / 256**size) else 0


def fill_with_noise(data: Bytes) -> int:
    """Fill memory with random bytes, and return their seed."""
    seed = secrets.randbits(128)
    for piece, noise in _with_noise(data, seed):
        piece[...] = noise
    return seed


def _with_noise(data: Bytes, seed: int) -> Iterator[tuple[Bytes, Bytes]]:
    """Return pieces of memory, and the random bytes for each."""
    generator = np.random.Generator(np.random.SFC64(seed))
    for begin in range(0, data.nbytes, _PIECE):
        piece = data[begin : begin + _PIECE]
        yield piece, np.frombuffer(generator.bytes(piece.nbytes), np.uint8)


def _least_that_tells(expected: float) -> int:
    """Return how many equal elements are too many for chance, where so many are expected (Chernoff's bound)."""
    least = max(1, math.floor(expected + 5 * math.sqrt(expected)))
    while least <= expected or math.exp(least - expected + least * math.log(expected / least)) > _FALSE_ALARM:
        least += 1
    return least
