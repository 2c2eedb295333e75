"""Arrays to send, and tritonclient's requests with them in band."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

__all__ = ["Floats", "endless", "in_band", "repeated", "varying"]

Floats = npt.NDArray[np.float32]

_COUNT: Final = 256
_SEED: Final = 1


def repeated(byte_size: int) -> list[Floats]:
    """Return arrays of one length, so many bytes each."""
    generator = np.random.default_rng(_SEED)
    return [generator.random(byte_size // 4, np.float32) for _ in range(_COUNT)]


def varying(byte_size: int) -> list[Floats]:
    """Return arrays of different lengths, so many bytes in the middle: from half of it to half as much again."""
    generator = np.random.default_rng(_SEED)
    middle = byte_size // 4
    lengths = generator.permutation(np.linspace(middle // 2, middle * 3 // 2, _COUNT).astype(int))
    return [generator.random(length, np.float32) for length in lengths]


def endless(arrays: list[Floats], first: int = 0) -> Iterator[Floats]:
    """Return the arrays again and again, beginning with one of them."""
    return itertools.islice(itertools.cycle(arrays), first % len(arrays), None)


def in_band(x: Floats) -> list[Any]:
    """Return the inputs of a request to an identity, as tritonclient takes them over gRPC, sync or aio."""
    tensor = tritonclient.grpc.InferInput("INPUT0", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]
