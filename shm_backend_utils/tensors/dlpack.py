"""DLPack: the structures of ``dlpack.h``, their capsules, and the parts that NumPy lacks.

NumPy lacks writable imported arrays, BF16, and support for consumers that break the protocol. NumPy still makes the
capsules, because a capsule's destructor must be compiled: a destructor in Python would lose an exception that is being
raised. A consumer renames a capsule "dltensor" to "used_dltensor", and then owns its tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import TensorTypeError

__all__ = [
    "CPU_DEVICE",
    "CUDA",
    "CUDA_MANAGED",
    "NAME_USED",
    "NAME_USED_VERSIONED",
    "NUMPY_MAKES_VERSIONED",
    "ON_GPU",
    "VERSION",
    "Consumed",
    "ForeignMemory",
    "array_of",
    "byte_strides",
    "c_strides",
    "check_is_resolved",
    "consume",
    "dtype_of",
    "export",
    "managed_tensor",
    "mark_used",
    "read",
    "rename_capsule",
    "straighten",
    "tensor_in",
    "versioned_tensor",
    "writable_alias",
]

CPU_DEVICE: Final = (1, 0)
"""``(kDLCPU, 0)``, as ``__dlpack_device__`` returns it."""

CUDA: Final = 2
"""The device type ``kDLCUDA``."""

CUDA_MANAGED: Final = 13
"""The device type ``kDLCUDAManaged``: unified memory."""

ON_GPU: Final = frozenset({CUDA, CUDA_MANAGED})
"""The device types that CUDA can copy from."""

VERSION: Final = (1, 0)
"""The version of the versioned capsules that this module makes."""

NUMPY_MAKES_VERSIONED: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

NAME: Final = b"dltensor"
NAME_USED: Final = b"used_dltensor"
NAME_VERSIONED: Final = b"dltensor_versioned"
NAME_USED_VERSIONED: Final = b"used_dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """``DLTensor``: shape and strides count elements; without strides, the tensor is C-contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedTensor(ctypes.Structure):
    """``DLManagedTensor``, the structure in a capsule "dltensor"."""

    _fields_ = (
        ("tensor", Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class VersionedTensor(ctypes.Structure):
    """``DLManagedTensorVersioned``, the structure in a capsule "dltensor_versioned"."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


capsule_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
capsule_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
rename_capsule: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class ForeignMemory:
    """Memory that belongs to ``owner``, described by NumPy's array interface."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, **interface}


class Consumed:
    """A tensor that was taken over from a capsule; its deleter is called when this object is destroyed."""

    def __init__(self, managed: ManagedTensor | VersionedTensor) -> None:
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def managed_tensor(capsule: object) -> ManagedTensor:
    """Return the structure that an unversioned capsule still owns; TypeError for a used capsule or another object."""
    if type(capsule).__name__ != "PyCapsule" or not capsule_is_valid(capsule, NAME):
        raise TypeError(f"expected an unused DLPack capsule 'dltensor', found {capsule!r}")
    return ManagedTensor.from_address(capsule_pointer(capsule, NAME))


def versioned_tensor(capsule: object) -> VersionedTensor | None:
    """Return the structure that a versioned capsule still owns; None for another object."""
    if type(capsule).__name__ != "PyCapsule" or not capsule_is_valid(capsule, NAME_VERSIONED):
        return None
    return VersionedTensor.from_address(capsule_pointer(capsule, NAME_VERSIONED))


def tensor_in(capsule: object) -> Tensor:
    """Return the tensor of a capsule of either kind; raises like :func:`managed_tensor`."""
    found = versioned_tensor(capsule) or managed_tensor(capsule)
    tensor: Tensor = found.tensor
    return tensor


def dtype_of(tensor: Tensor) -> DType:
    """Return the row of a tensor's data type; raises TypeError for one that is not in the table."""
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    for dtype in dtypes.BY_NAME.values():
        if (dtype.dlpack_code, dtype.dlpack_bits, 1) == (code, bits, lanes):
            return dtype
    raise TypeError(f"DLPack type code {code} with {bits} bits and {lanes} lanes has no counterpart in Triton")


def byte_strides(tensor: Tensor, itemsize: int) -> tuple[int, ...] | None:
    """Return a tensor's strides in bytes; None if it has no strides, because it is C-contiguous."""
    if not tensor.strides:
        return None
    return tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))


def straighten(tensor: Tensor) -> None:
    """Write the strides of C order: NumPy's are arbitrary where a size is 0 or 1, and some consumers read them."""
    if not tensor.strides:
        return
    stride = 1
    for axis in reversed(range(tensor.ndim)):
        tensor.strides[axis] = stride
        stride *= tensor.shape[axis]


def export(array: npt.NDArray[Any], max_version: tuple[int, int] | None = None) -> object:
    """Return a capsule over the array's memory; a versioned one if the consumer asks for it and NumPy is 2.1 or later.

    With an older NumPy, such a consumer gets an unversioned capsule, even for a read-only array. BufferError if the
    array is read-only and the consumer asks for an unversioned capsule.
    """
    is_bf16 = array.dtype == dtypes.BF16.numpy
    known = array.view(np.uint16) if is_bf16 else array  # NumPy exports no BF16
    asks_for_versioned = max_version is not None and max_version >= VERSION
    if asks_for_versioned and NUMPY_MAKES_VERSIONED:
        capsule = known.__dlpack__(max_version=VERSION)
    elif asks_for_versioned:
        capsule = writable_alias(known).__dlpack__()
    else:
        capsule = known.__dlpack__()
    if is_bf16:
        tensor_in(capsule).dtype.code = dtypes.BF16.dlpack_code
    if array.strides != c_strides(array.shape, array.itemsize) and array.flags.c_contiguous:
        straighten(tensor_in(capsule))
    return capsule


def writable_alias(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array over the same memory that claims to be writable, for consumers that require it but only read."""
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(ForeignMemory(array, interface)).view(array.dtype)


def mark_used(capsule: object) -> None:
    """Rename a capsule to "used_dltensor", for a consumer that has given it a name of its own."""
    rename_capsule(capsule, NAME_USED)


class _Lender:
    """A stand-in for a producer that does not accept all of NumPy's keywords."""

    __slots__ = ("_produce",)

    def __init__(self, produce: Callable[[], object]) -> None:
        self._produce = produce

    def __dlpack__(self, **_: Any) -> Any:
        return self._produce()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


def read(produce: Callable[[], object]) -> npt.NDArray[Any]:
    """Return the CPU memory of an unversioned capsule as an array for reading; ``produce`` may be called twice."""
    return array_of(_Lender(produce))


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a host object's memory as an array; BufferError, RuntimeError or TypeError if it exports none."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):
        return consume(value.__dlpack__())


def check_is_resolved(value: Any, tensor: str) -> None:
    """Raise TensorTypeError for a lazily negated, or lazily zero, tensor of torch: capsules cannot express that."""
    if hasattr(value, "resolve_neg") and value.is_neg():
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} lies in memory with the wrong sign (torch's is_neg()); give value.resolve_neg()"
        )
    if hasattr(value, "_is_zerotensor") and value._is_zerotensor():
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} has zeros without memory (torch's _is_zerotensor()); give value.clone()"
        )


def consume(capsule: object) -> npt.NDArray[Any]:
    """Take over an unversioned capsule of CPU memory as a writable array; TypeError for another object."""
    managed = managed_tensor(capsule)
    tensor = managed.tensor
    if tensor.device.device_type != CPU_DEVICE[0]:
        raise TypeError(f"expected CPU memory (device type 1), found device type {tensor.device.device_type}")
    dtype = dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    rename_capsule(capsule, NAME_USED)
    consumed = Consumed(managed)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype.numpy)  # no elements, and maybe no address
    interface = {
        "shape": shape,
        "typestr": dtype.numpy.str,  # for BF16, only its size
        "data": ((tensor.data or 0) + tensor.byte_offset, False),
        "strides": byte_strides(tensor, dtype.itemsize),
    }
    return np.asarray(ForeignMemory(consumed, interface)).view(dtype.numpy)
