"""The structures of ``dlpack.h``, and the capsules of Python that carry them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from .. import dtypes
from ..dtypes import DType

__all__ = [
    "NAME_USED",
    "NAME_USED_VERSIONED",
    "NUMPY_MAKES_VERSIONED",
    "VERSION",
    "Consumed",
    "ForeignMemory",
    "byte_strides",
    "c_strides",
    "dtype_of",
    "managed_tensor",
    "rename_capsule",
    "straighten",
    "tensor_in",
    "versioned_tensor",
]

VERSION: Final = (1, 0)
"""The version of versioned capsules that is spoken here."""

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
    """``DLTensor``: shape and strides are counted in elements; without strides, it is C-contiguous."""

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
    """``DLManagedTensor``, which a capsule "dltensor" has."""

    _fields_ = (
        ("tensor", Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class VersionedTensor(ctypes.Structure):
    """``DLManagedTensorVersioned``, which a capsule "dltensor_versioned" has."""

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
    """Memory that belongs to ``owner``, in the words of NumPy's array interface."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, **interface}


class Consumed:
    """A tensor that was taken over from a capsule; calls its deleter when it dies."""

    def __init__(self, managed: ManagedTensor | VersionedTensor) -> None:
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def managed_tensor(capsule: object) -> ManagedTensor:
    """Return the structure of an unversioned capsule, which keeps it; TypeError if it is no such capsule, or used."""
    if type(capsule).__name__ != "PyCapsule" or not capsule_is_valid(capsule, NAME):
        raise TypeError(f"expected an unused DLPack capsule 'dltensor', found {capsule!r}")
    return ManagedTensor.from_address(capsule_pointer(capsule, NAME))


def versioned_tensor(capsule: object) -> VersionedTensor | None:
    """Return the structure of a versioned capsule, which keeps it; None if it is no such capsule."""
    if type(capsule).__name__ != "PyCapsule" or not capsule_is_valid(capsule, NAME_VERSIONED):
        return None
    return VersionedTensor.from_address(capsule_pointer(capsule, NAME_VERSIONED))


def tensor_in(capsule: object) -> Tensor:
    """Return the tensor of a capsule of either kind; raises as :func:`managed_tensor`."""
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
    """Return a tensor's strides in bytes; None if it says none, as it is C-contiguous."""
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
    """Write the strides of C order: NumPy leaves any where a size is 0 or 1, and some consumers read them."""
    if not tensor.strides:
        return
    stride = 1
    for axis in reversed(range(tensor.ndim)):
        tensor.strides[axis] = stride
        stride *= tensor.shape[axis]
