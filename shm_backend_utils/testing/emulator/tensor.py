"""Tensors: NumPy's view of one, DLPack's view of it, and what leaves of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ...dtypes import BF16, BYTES, DType
from ...tensors.dlpack import CPU_DEVICE, CUDA
from . import capsules
from .arguments import refuse, text
from .bytes_tensors import deserialize_bytes_tensor, serialize_byte_tensor
from .capsules import CUDA_HOST
from .class_function import ClassFunction
from .datatypes import of_array
from .errors import TritonModelException
from .faults import Faults

__all__ = ["Tensor", "tensors_in"]

_NOTHING = np.empty(0, np.uint8)
_HOST_DEVICES = frozenset({CPU_DEVICE[0], CUDA_HOST})


def _from_dlpack(kind: type[Tensor], name: str, tensor: object, /) -> Tensor:
    """Return a tensor over the memory of another library's, which lives as long as it.

    It is in C order: a DLPack capsule, which is used up, or what has ``__dlpack__`` and ``__dlpack_device__``.
    TritonModelException if the name is empty, or it is no such tensor, or one that is not contiguous, or not on a CPU
    or a GPU.
    """
    name = text("from_dlpack", "name", name)
    if not name:
        _refuse_empty_name()
    taken = capsules.take(tensor) if capsules.is_capsule(tensor) else capsules.take_of(tensor)
    made = kind.__new__(kind)
    made._fill(name, taken.datatype, taken.shape, taken.memory, None, taken.device, taken.owner)
    made._array = made._copied_view()
    return made


class Tensor:
    """A tensor of a request or a response.

    What ``as_numpy`` returns and what leaves with a response are not always the same memory: of a tensor that was made
    of an array they are, until it has been sent once; of any other, the array is a copy that was made with the tensor.

    Strings are objects, or NumPy's bytes. An array that is not C-contiguous is copied. TritonModelException if the name
    is empty, or the array has a type that Triton does not have; TypeError if it is no array.
    """

    __slots__ = ("__weakref__", "_array", "_datatype", "_device", "_memory", "_name", "_owner", "_saved", "_shape")

    _faults = Faults()
    _saved: npt.NDArray[Any] | None
    from_dlpack = ClassFunction(_from_dlpack)

    def __init__(self, name: str, numpy_array: npt.NDArray[Any], /) -> None:
        name = text("Tensor", "name", name)
        if not isinstance(numpy_array, np.ndarray):
            refuse("Tensor", "numpy_array", numpy_array, "a numpy.ndarray")
        if not name:
            _refuse_empty_name()
        datatype = of_array(numpy_array)
        array = numpy_array if numpy_array.flags.c_contiguous else np.ascontiguousarray(numpy_array)
        memory = _packed(array) if datatype is BYTES else array
        self._fill(name, datatype, array.shape, memory, array)
        if self._faults.is_stub_for_numpy_1:
            self._saved = _NOTHING

    def _fill(
        self,
        name: str,
        datatype: DType,
        shape: Sequence[int],
        memory: npt.NDArray[Any],
        array: npt.NDArray[Any] | None,
        device: tuple[int, int] = CPU_DEVICE,
        owner: object = None,
    ) -> None:
        self._name = name
        self._datatype = datatype
        self._shape = shape
        self._memory = memory
        self._array = array
        self._device = device
        self._owner = owner
        self._saved = None

    @classmethod
    def _loaded(cls, name: str, datatype: DType, shape: Sequence[int], memory: npt.NDArray[Any]) -> Tensor:
        """Return a tensor over memory of the pool, which is its own."""
        made = cls.__new__(cls)
        made._fill(name, datatype, shape, memory, None)
        made._array = made._copied_view()
        return made

    def name(self) -> str:
        """Return its name."""
        return self._name

    def shape(self) -> list[int]:
        """Return its shape."""
        return list(self._shape)

    def is_cpu(self) -> bool:
        """Return whether it lies in memory of the host."""
        return self._device[0] in _HOST_DEVICES

    def triton_dtype(self) -> NoReturn:
        """Raise TypeError: no stub has a Python type for Triton's data types."""
        raise TypeError(
            "Unable to convert function return value to a Python type! The signature was\n"
            "\t(self: c_python_backend_utils.Tensor) -> TRITONSERVER_datatype_enum"
        )

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return the array that it was made of, or else the copy that was made with it; the same each time.

        TritonModelException if it lies on a GPU, or is BF16.
        """
        if not self.is_cpu():
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype is BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        assert self._array is not None
        return self._array

    def to_dlpack(self) -> object:
        """Return an unversioned capsule over the memory that leaves with a response.

        TritonModelException if it holds strings, or lies on a GPU and is of a type that Triton does not have.
        """
        if self._datatype is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return capsules.make(self)

    def __dlpack__(self, stream: object = None) -> object:
        """Return the same; from Triton 23.05 on."""
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def _copied_view(self) -> npt.NDArray[Any] | None:
        """Return what ``as_numpy`` has of memory that is not an array of NumPy's own."""
        datatype = self._datatype
        if datatype is BF16 or self._device[0] == CUDA:
            return None
        if datatype is BYTES:
            return deserialize_bytes_tensor(self._memory.tobytes()).reshape(self._shape)
        if datatype.name == "INVALID":
            raise TritonModelException("Dtype is invalid.")
        copy = np.array(self._memory)
        if self._faults.is_stub_for_numpy_1 and copy.size:
            copy[...] = copy.flat[0]
        return copy

    def _save(self) -> npt.NDArray[Any]:
        """Return what lies in the pool of it, once it has been sent: what was there when it was sent first."""
        if self._saved is None:
            self._saved = self._memory = self._memory.copy()
        return self._saved


def tensors_in(function: str, argument: str, value: object) -> list[Tensor]:
    """Return the tensors of a sequence that is the argument of a function; None among them stays."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        refuse(function, argument, value, "a sequence of tensors")
    for tensor in value:
        if tensor is not None and not isinstance(tensor, Tensor):
            refuse(function, argument, tensor, "a sequence of tensors")
    return list(value)


def _packed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(serialize_byte_tensor(array) or b"", np.uint8)


def _refuse_empty_name() -> NoReturn:
    raise TritonModelException("Tensor name cannot be an empty string.")
