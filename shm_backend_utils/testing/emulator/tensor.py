"""Tensors: NumPy's view of one, DLPack's view of it, and the part of it that is sent."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ...dtypes import BF16, BY_NAME, BYTES, DType
from ...gpu.arrays.capsules import CapsuleTensor, capsule_over
from ...tensors import dlpack
from ...tensors.dlpack import CPU_DEVICE, CUDA, Consumed, ForeignMemory, c_strides, managed_tensor, rename_capsule
from .host import Faults
from .pybind import ClassFunction, StubDiesError, TritonModelException, refuse, text

__all__ = ["Tensor", "deserialize_bytes_tensor", "packed", "serialize_byte_tensor", "tensors_in"]

_LENGTH = struct.Struct("<I")

_INVALID: Final = DType("INVALID", np.dtype("V1"), -1, 0, 1)
"""The stub's type for a DLPack type that Triton does not have."""

_OF_NUMPY: Final[Mapping[np.dtype[Any], DType]] = MappingProxyType(
    {row.numpy: row for row in BY_NAME.values() if row is not BF16}
)
_OF_DLPACK: Final[Mapping[tuple[int, int], DType]] = MappingProxyType(
    {(row.dlpack_code, row.dlpack_bits): row for row in BY_NAME.values() if row is not BYTES}
)

CUDA_HOST: Final = 3
"""The device type ``kDLCUDAHost``: pinned memory of the host."""

_NUMPY_LOOPS: Final = np.lib.NumpyVersion(np.__version__) < "2.0.0"
_KNOWN_DEVICES: Final = frozenset({dlpack.CPU_DEVICE[0], dlpack.CUDA, CUDA_HOST})
set_destructor: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)
_NAME_USED: Final = b"used_dlpack"
"""The stub's name for a capsule that it took over; DLPack prescribes another."""

_NOTHING = np.empty(0, np.uint8)
_HOST_DEVICES = frozenset({CPU_DEVICE[0], CUDA_HOST})


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """Return strings in C order, each after its length; an empty tuple for no elements, None for other types."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype == np.object_:
        elements = [item if type(item) is bytes else str(item).encode() for item in input_tensor.ravel().tolist()]
    elif input_tensor.dtype.type is np.bytes_:
        elements = input_tensor.ravel().tolist()
    else:
        return None
    return b"".join([part for element in elements for part in (_LENGTH.pack(len(element)), element)])


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """Return the strings in serialized bytes, as a one-dimensional array of bytes objects."""
    found = []
    offset = 0
    while offset < len(encoded_tensor):
        (length,) = _LENGTH.unpack_from(encoded_tensor, offset)
        offset += _LENGTH.size
        found.append(struct.unpack_from(f"<{length}s", encoded_tensor, offset)[0])
        offset += length
    return np.array(found, dtype=np.object_)


def _datatype_of_array(array: npt.NDArray[Any]) -> DType:
    """Return the data type of an array; TritonModelException if Triton has none for it."""
    found = _OF_NUMPY.get(array.dtype)
    if found is not None:
        return found
    if array.dtype.type is np.bytes_:
        return BYTES
    raise TritonModelException("NumPy dtype is not supported.")


def _datatype_of_dlpack(code: int, bits: int, lanes: int) -> DType:
    """Return the data type of a DLPack tensor; TritonModelException if it is a bfloat of other than 16 bits."""
    if lanes == 1 and code == BF16.dlpack_code and bits != BF16.dlpack_bits:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {bits}")
    return _OF_DLPACK.get((code, bits), _INVALID) if lanes == 1 else _INVALID


@dataclass(frozen=True, slots=True, eq=False)
class GpuMemory:
    """Memory of a GPU that was taken over from a capsule; its owner keeps it."""

    address: int
    owner: object


@dataclass(slots=True)
class Taken:
    """A tensor that was taken over from a capsule; its owner keeps the memory."""

    datatype: DType
    shape: list[int]
    device: tuple[int, int]
    memory: npt.NDArray[Any]  # an array over it; without an element, if it is on a GPU
    owner: object


def _take_of(tensor: Any) -> Taken:
    """Take over the capsule that a tensor of another library exports."""
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         "
            "or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    if isinstance(tensor, np.ndarray) and _NUMPY_LOOPS:
        raise StubDiesError(
            f"from_dlpack of an array of NumPy {np.__version__}: a real stub dies of it, as it renames NumPy's "
            "capsule, whose destructor then never ends; make the Tensor from the array itself"
        )
    device, number = tensor.__dlpack_device__()
    if device == dlpack.CUDA:
        capsule = tensor.__dlpack__(stream=number + 1)  # a stream of the stub's own
    else:
        _check_device(device)
        capsule = tensor.__dlpack__(stream=None)
    taken = _take(capsule)
    dlpack.mark_used(capsule)  # else NumPy 2 would warn of it, though no other code uses it
    return taken


def _take(capsule: object) -> Taken:
    """Take over an unused capsule of a tensor in C order, on a device that the backend knows; else raise."""
    managed = _managed(capsule)
    tensor = managed.tensor
    shape = list(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_in_c_order(shape, tensor.strides[: tensor.ndim]):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    device = tensor.device.device_type
    _check_device(device)
    datatype = _datatype_of_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    rename_capsule(capsule, _NAME_USED)
    set_destructor(capsule, None)  # some never end if they find that name
    owner = Consumed(managed)
    address = (tensor.data or 0) + tensor.byte_offset
    if device == dlpack.CUDA:
        there = GpuMemory(address, owner)
        return Taken(datatype, shape, (device, tensor.device.device_id), np.empty(0, np.uint8), there)
    return Taken(datatype, shape, dlpack.CPU_DEVICE, _array_over(owner, address, shape, datatype), owner)


def _capsule_of(tensor: Tensor) -> object:
    """Return a capsule over a tensor's memory, which the capsule keeps alive."""
    there = tensor._owner
    if isinstance(there, GpuMemory):
        if tensor._datatype.name == "INVALID":
            raise TritonModelException('DType code "0" is not supported.')
        dtype, shape = tensor._datatype.numpy, tuple(tensor._shape)
        strides = c_strides(shape, dtype.itemsize)
        return capsule_over(CapsuleTensor(there.address, shape, strides, dtype, *tensor._device, False), there, None)
    return dlpack.export(dlpack.writable_alias(tensor._memory))


def _managed(capsule: object) -> Any:
    try:
        return managed_tensor(capsule)
    except TypeError as error:
        raise StubDiesError(f"from_dlpack: {error}; a real stub reads memory that is gone") from None


def _check_device(device: int) -> None:
    if device not in _KNOWN_DEVICES:
        raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")


def _is_in_c_order(shape: list[int], strides: list[int]) -> bool:
    """Return whether the stub considers it C order: it does not check the first axis."""
    expected = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _array_over(owner: object, address: int, shape: list[int], datatype: DType) -> npt.NDArray[Any]:
    if math.prod(shape) == 0:
        return np.empty(shape, datatype.numpy)
    interface = {"shape": tuple(shape), "typestr": datatype.numpy.str, "data": (address, False)}
    return np.asarray(ForeignMemory(owner, interface)).view(datatype.numpy)


def _from_dlpack(kind: type[Tensor], name: str, tensor: object, /) -> Tensor:
    """Return a tensor over the memory of another library's tensor or capsule, and keep that memory alive."""
    name = text("from_dlpack", "name", name)
    if not name:
        _refuse_empty_name()
    taken = _take(tensor) if type(tensor).__name__ == "PyCapsule" else _take_of(tensor)
    made = kind.__new__(kind)
    made._fill(name, taken.datatype, taken.shape, taken.memory, None, taken.device, taken.owner)
    made._array = made._copied_view()
    return made


class Tensor:
    """A tensor of a request or a response.

    The array of ``as_numpy`` and the memory that a response sends can differ. A tensor that was made from an array has
    one memory until it is sent. For any other tensor, the array is a copy that was made with the tensor.
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
        datatype = _datatype_of_array(numpy_array)
        array = numpy_array if numpy_array.flags.c_contiguous else np.ascontiguousarray(numpy_array)
        memory = packed(array) if datatype is BYTES else array
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
        """Return the array that it was made from, or else the copy that was made with it; the same array each time."""
        if not self.is_cpu():
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype is BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        assert self._array is not None
        return self._array

    def to_dlpack(self) -> object:
        """Return an unversioned capsule over the memory that a response sends."""
        if self._datatype is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return _capsule_of(self)

    def __dlpack__(self, stream: object = None) -> object:
        """Return the same; from Triton 23.05 on."""
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def _copied_view(self) -> npt.NDArray[Any] | None:
        """Return the copy that ``as_numpy`` gives of memory that is not an array of NumPy's own."""
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
        """Return the sent tensor's data in the pool: a copy from when it was first sent."""
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


def packed(strings: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return strings as bytes in memory."""
    return np.frombuffer(serialize_byte_tensor(strings) or b"", np.uint8)


def _refuse_empty_name() -> NoReturn:
    raise TritonModelException("Tensor name cannot be an empty string.")
