"""Arrays to send, and tritonclient's requests with them in band."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http

Floats = npt.NDArray[np.float32]

_Given = TypeVar("_Given")

_COUNT: Final = 256
_SEED: Final = 1
_ROWS: Final = range(8, 64)


class Upload(NamedTuple):
    """An array to send, and the sum of each of its rows, which is to come back."""

    x: Floats
    sums: Floats


def repeated(byte_size: int) -> list[Floats]:
    """Return arrays of one length, so many bytes each."""
    generator = np.random.default_rng(_SEED)
    return [generator.random(byte_size // 4, np.float32) for _ in range(_COUNT)]


def varying(byte_size: int) -> list[Floats]:
    """Return arrays of different lengths, so many bytes in the middle: from half of it to half as much again."""
    generator = np.random.default_rng(_SEED)
    return [generator.random(length, np.float32) for length in generator.permutation(_lengths(byte_size))]


def uploads_of(byte_size: int) -> list[Upload]:
    """Return arrays of rows, no two of one shape, of as many bytes as those of :func:`varying`.

    Their numbers are small and whole, so that the sums are exact in whatever order they are added.
    """
    generator = np.random.default_rng(_SEED)
    shapes = [(rows, length // rows) for length, rows in zip(_lengths(byte_size), itertools.cycle(_ROWS), strict=False)]
    arrays = [generator.integers(0, 4, shape).astype(np.float32) for shape in generator.permutation(shapes)]
    return [Upload(x, x.sum(axis=1)) for x in arrays]


def _lengths(byte_size: int) -> npt.NDArray[Any]:
    middle = byte_size // 4
    return np.linspace(middle // 2, middle * 3 // 2, _COUNT).astype(int)


def endless(given: list[_Given], first: int = 0) -> Iterator[_Given]:
    """Return what is given again and again, beginning with one of it."""
    return itertools.islice(itertools.cycle(given), first % len(given), None)


def in_band(x: Floats, protocol: str = "grpc") -> list[Any]:
    """Return the inputs of a request with one tensor, as tritonclient takes them, sync or aio."""
    triton = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    tensor = triton.InferInput("INPUT0", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]
