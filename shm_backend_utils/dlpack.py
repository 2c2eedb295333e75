"""DLPack capsules, made and consumed without a compiler: the structures of ``dlpack.h`` (version 1.0) with ``ctypes``.

Two layouts are in use. The older one has no version and no flags; the versioned one can say that memory is read-only::

    DLManagedTensor  { DLTensor, manager_ctx, deleter }                           capsule "dltensor"
    DLManagedTensorVersioned { version, manager_ctx, deleter, flags, DLTensor }   capsule "dltensor_versioned"

A capsule owns its tensor until a consumer renames the capsule; from then on the consumer owns it and calls the deleter
when it is done. What is exported here keeps the exporting array alive until then.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from . import dtypes
from .dtypes import DType

__all__ = ["CPU_DEVICE", "DataType", "consume", "export", "export_versioned"]

CPU_DEVICE: Final = (1, 0)
"""``(kDLCPU, 0)``, as ``__dlpack_device__`` returns it."""

_READ_ONLY: Final = 1
_NAME: Final = b"dltensor"
_NAME_VERSIONED: Final = b"dltensor_versioned"
_NAME_USED: Final = b"used_dltensor"


class DataType(NamedTuple):
    """``DLDataType`` with one lane."""

    code: int
    bits: int


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_CapsuleDestructor: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_capsule_new: Final = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)
# Declared with void pointers, not py_object: a capsule in its destructor has no references, and must not be given one.
_capsule_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_get_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_set_name: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_incref: Final = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
_decref: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))


class _Export:
    """What an exported tensor points to. One reference to it belongs to the tensor, until its deleter runs."""

    __slots__ = ("array", "managed", "shape", "strides")

    def __init__(self, array: npt.NDArray[Any], managed: ctypes.Structure, data_type: DataType) -> None:
        self.array = array
        self.managed = managed
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*[stride // array.itemsize for stride in array.strides])
        managed.manager_ctx = id(self)
        tensor = managed.tensor
        tensor.data = array.ctypes.data
        tensor.device = _Device(*CPU_DEVICE)
        tensor.ndim = array.ndim
        tensor.dtype = _DataType(data_type.code, data_type.bits, 1)
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))


@_Deleter
def _delete(address: int) -> None:
    _decref(_ManagedTensor.from_address(address).manager_ctx)


@_Deleter
def _delete_versioned(address: int) -> None:
    _decref(_ManagedTensorVersioned.from_address(address).manager_ctx)


@_CapsuleDestructor
def _destroy(capsule: int) -> None:
    if _capsule_is_valid(capsule, _NAME):
        _delete(_capsule_get_pointer(capsule, _NAME))


@_CapsuleDestructor
def _destroy_versioned(capsule: int) -> None:
    if _capsule_is_valid(capsule, _NAME_VERSIONED):
        _delete_versioned(_capsule_get_pointer(capsule, _NAME_VERSIONED))


def export(array: npt.NDArray[Any], data_type: DataType) -> object:
    """Return an unversioned capsule over the array's memory, which the consumer takes for writable.

    Parameters
    ----------
    array : numpy.ndarray
        On the CPU, of any strides that are multiples of its item size. Kept alive by the consumer.
    data_type : DataType
        What to call its elements.
    """
    managed = _ManagedTensor(deleter=_delete)
    _incref(_Export(array, managed, data_type))
    return _capsule_new(ctypes.addressof(managed), _NAME, _destroy)


def export_versioned(array: npt.NDArray[Any], data_type: DataType) -> object:
    """Return a capsule of DLPack 1.0 over the array's memory, marked as read-only if the array is; else as above."""
    flags = 0 if array.flags.writeable else _READ_ONLY
    managed = _ManagedTensorVersioned(major=1, minor=0, deleter=_delete_versioned, flags=flags)
    _incref(_Export(array, managed, data_type))
    return _capsule_new(ctypes.addressof(managed), _NAME_VERSIONED, _destroy_versioned)


class _Import:
    """A consumed tensor's memory, as NumPy's array interface wants to see it; calls the deleter when it dies."""

    def __init__(self, managed: _ManagedTensor, dtype: DType) -> None:
        self._managed = managed
        tensor = managed.tensor
        shape = tuple(tensor.shape[: tensor.ndim])
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.numpy.str,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "strides": _byte_strides(tensor, dtype.itemsize),
        }

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def consume(capsule: object) -> npt.NDArray[Any]:
    """Take over an unversioned capsule of CPU memory and return it as an array, without a copy.

    NumPy's own ``from_dlpack`` would return it read-only, and does not know the one-bit integers by which Triton's
    Python backend means BOOL (``pb_stub_utils.cc``).

    Raises
    ------
    TypeError
        It is no such capsule, or of a data type that has no counterpart in :mod:`shm_backend_utils.dtypes`.
    """
    address = id(capsule)
    if type(capsule).__name__ != "PyCapsule" or not _capsule_is_valid(address, _NAME):
        raise TypeError(f"expected an unused DLPack capsule 'dltensor', found {capsule!r}")
    managed = _ManagedTensor.from_address(_capsule_get_pointer(address, _NAME))
    tensor = managed.tensor
    if tensor.device.device_type != CPU_DEVICE[0]:
        raise TypeError(f"expected CPU memory (device type 1), found device type {tensor.device.device_type}")
    dtype = _dtype_of(tensor)
    _capsule_set_name(address, _NAME_USED)
    return np.asarray(_Import(managed, dtype))


def _dtype_of(tensor: _Tensor) -> DType:
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    if (code, bits, lanes) == (0, 1, 1):
        return dtypes.BY_NAME["BOOL"]
    for dtype in dtypes.BY_NAME.values():
        if (dtype.dlpack_code, dtype.dlpack_bits, 1) == (code, bits, lanes):
            return dtype
    raise TypeError(f"DLPack type code {code} with {bits} bits and {lanes} lanes has no counterpart in Triton")


def _byte_strides(tensor: _Tensor, itemsize: int) -> tuple[int, ...] | None:
    if not tensor.strides or math.prod(tensor.shape[: tensor.ndim]) == 0:
        return None
    return tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
