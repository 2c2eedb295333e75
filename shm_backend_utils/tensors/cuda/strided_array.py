"""StridedArray: elements on a GPU that are not C-contiguous, described and not copied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...memory.cuda.runtime import CudaRuntime

__all__ = ["StridedArray"]


@dataclass(frozen=True, eq=False)
class StridedArray:
    """Elements on a GPU, in any order: of another library's array."""

    runtime: CudaRuntime
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; 0 or less, too
    dtype: np.dtype[Any]
    device: int  # this process' number of the GPU
    owner: object  # keeps the memory
    is_read_only: bool = False

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions there are."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the elements have, without what lies between them."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<StridedArray {self.dtype} {list(self.shape)} strides {list(self.strides)} GPU {self.device}>"
