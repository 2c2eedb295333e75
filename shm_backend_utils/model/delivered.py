"""Tensors that Triton delivered: what a plain client sends, and what an ensemble's step before gave."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

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
        self._backend: TritonBackend | None = backend

    @property
    def array(self) -> Any:
        """The tensor as an array of NumPy, read-only."""
        if self._backend is not None:
            self._array = self._backend.input(self.tensor, self._dtype).view()
            self._array.flags.writeable = False
            self._backend = None
        return self._array

    @property
    def writable(self) -> bool:
        """Whether it may be written to: never."""
        return False

    @property
    def attributes(self) -> BufferAttributes:
        """Where the bytes lie, and how many they are."""
        return BufferAttributes(MemoryType.CPU, 0, math.prod(self.shape) * self._dtype.itemsize)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the tensor as a C-contiguous array over the memory that Triton delivered it in, read-only."""
        array: npt.NDArray[Any] = self.array.view()
        return array

    def __dlpack__(self, **arguments: Any) -> Any:
        """Return a DLPack capsule over this very memory; raises as :meth:`TensorView.__dlpack__`."""
        assert self.array is not None  # it is made here
        return super().__dlpack__(**arguments)
