"""Views that know where their tensor came from, so that it can be passed on as it is: inputs, most of all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from ..dtypes import BYTES, DType
from ..gpu.model import DeviceArrays
from ..protocol.spans import Table
from ..tensors.strings import Strings
from ..tensors.view import TRITON, BufferAttributes, MemoryType, StringsView, TensorView
from .triton import TritonBackend

__all__ = ["DeliveredView", "InputView", "view_of"]


class InputView(TensorView):
    """An input in the client's memory, on the host and not of strings."""

    __slots__ = ("table",)

    table: Table  # of its request: it says where it lies, and another one's memory is not passed on


class DeliveredView(TensorView):
    """A tensor that Triton delivered, on the host and not of strings. Its array is made when it is asked for."""

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
            return super().__getattr__(name)  # type: ignore[misc]  # which type checkers must not see
        self._array = self._backend.input(self.tensor, self._dtype).view()
        self._array.flags.writeable = False
        return self._array

    @property
    def writable(self) -> bool:
        return False

    @property
    def attributes(self) -> BufferAttributes:
        return BufferAttributes(MemoryType.CPU, 0, math.prod(self.shape) * self._dtype.itemsize)


def view_of(tensor: Any, dtype: DType | None, backend: TritonBackend, arrays: DeviceArrays) -> TensorView:
    """Return a tensor of the Python backend, of this configured dtype if that is known, as a read-only view."""
    name = tensor.name()
    if not tensor.is_cpu():
        adopted = arrays.adopt_capsule(tensor.to_dlpack())
        return arrays.view(name, adopted, dtypes.from_numpy(np.dtype(adopted.dtype), name), TRITON, writable=False)
    array = backend.input(tensor, dtype)
    found = dtypes.BY_NUMPY.get(array.dtype) or dtypes.from_numpy(array.dtype, name)
    if found is BYTES:
        return StringsView(name, Strings.of(name, array), TRITON)
    array = array.view()
    array.flags.writeable = False
    return TensorView(name, array, found, TRITON)
