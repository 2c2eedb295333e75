"""The requests that perf_analyzer is to send: each to a sample model, with one input and one output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes

__all__ = ["CASES", "Case"]

_SEED: Final = 2024


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes
    ----------
    name : str
        What it is called here.
    model, input_name, output_name : str
    type_name : str
        Triton's name of the input's data type.
    row_shape : tuple of int
        The input's shape, without a batch dimension.
    batch_size : int
        0 if the model has no batch dimension.
    """

    name: str
    model: str
    input_name: str
    output_name: str
    type_name: str
    row_shape: tuple[int, ...]
    batch_size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The input's whole shape."""
        return (self.batch_size, *self.row_shape) if self.batch_size else self.row_shape

    @property
    def byte_size(self) -> int:
        """The size of the input."""
        return math.prod(self.shape) * dtypes.BY_NAME[self.type_name].itemsize

    def row(self) -> npt.NDArray[Any]:
        """Return the input without a batch dimension: the same random numbers each time."""
        random = np.random.default_rng(_SEED)
        if self.type_name == "UINT8":
            return random.integers(0, 256, self.row_shape, np.uint8)
        return random.random(self.row_shape, np.float32)

    def tensor(self) -> npt.NDArray[Any]:
        """Return the input. As perf_analyzer makes a batch of it, all rows are equal."""
        return np.ascontiguousarray(np.broadcast_to(self.row(), self.shape))


def _identity(name: str, byte_size: int) -> Case:
    return Case(name, "identity", "INPUT0", "OUTPUT0", "FP32", (byte_size // 4,))


def _multiply(batch_size: int) -> Case:
    return Case(f"multiply-{batch_size}", "multiply", "INPUT0", "OUTPUT0", "FP32", (3, 224, 224), batch_size)


_ALL: Final = (
    _identity("identity-4KiB", 4 << 10),
    _identity("identity-1MiB", 1 << 20),
    _identity("identity-16MiB", 16 << 20),
    _multiply(1),
    _multiply(4),
    _multiply(16),
    Case("photograph", "image_resize_normalize", "IMAGE", "NORMALIZED", "UINT8", (480, 640, 3)),
)
CASES: Final = {case.name: case for case in _ALL}
