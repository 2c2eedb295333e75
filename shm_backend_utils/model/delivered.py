"""Tensors that Triton delivered: what a plain client sends, and what an ensemble's step before gave."""

from __future__ import annotations

import math
from typing import Any

from ..dtypes import DType
from ..tensors.attributes import BufferAttributes, MemoryType
from ..tensors.view import TRITON, TensorView
from .triton import TritonBackend

__all__ = ["DeliveredView"]


class DeliveredView(TensorView):
    """A tensor on the host, not of strings. Its array is made when it is asked for: to pass it on, none is needed.

    Attributes
    ----------
    tensor : triton_python_backend_utils.Tensor
        As it came.
    """

    __slots__ = ("_backend", "tensor")

    def __init__(self, name: str, tensor: Any, dtype: DType, backend: TritonBackend) -> None:
        self.name = name
        self.path = TRITON
        self.shape = tuple(tensor.shape())
        self.dtype = dtype.numpy
        self.tensor = tensor
        self._dtype = dtype
        self._memory_type = MemoryType.CPU
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        """Make the array, read-only, when it is looked for and not there yet."""
        if name != "_array":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._array = self._backend.input(self.tensor, self._dtype).view()
        self._array.flags.writeable = False
        return self._array

    @property
    def writable(self) -> bool:
        """Whether it may be written to: never."""
        return False

    @property
    def attributes(self) -> BufferAttributes:
        """Where the bytes lie, and how many they are."""
        return BufferAttributes(MemoryType.CPU, 0, math.prod(self.shape) * self._dtype.itemsize)
