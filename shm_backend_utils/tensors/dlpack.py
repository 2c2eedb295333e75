"""DLPack capsules where NumPy's own support ends. The structures are those of ``dlpack.h``.

NumPy makes the capsules, because their destructors must be compiled: one that is written in Python and runs while an
exception is being raised loses that exception. This module adds what NumPy does not do: taking a capsule over as a
*writable* array, and dealing with consumers that do not follow the protocol.

A capsule named "dltensor" owns its tensor until a consumer renames it to "used_dltensor"; from then on the consumer
owns the tensor, and calls its deleter when it is done.
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

__all__ = ["CPU_DEVICE", "CUDA", "ON_GPU", "array_of", "consume", "export", "mark_used", "read", "writable_alias"]

CPU_DEVICE: Final = (1, 0)
"""``(kDLCPU, 0)``, as ``__dlpack_device__`` returns it."""

CUDA: Final = 2
"""The device type ``kDLCUDA``."""

ON_GPU: Final = frozenset({CUDA, 13})
"""What CUDA can copy from: ``kDLCUDA``, and ``kDLCUDAManaged``, which is unified memory."""

_NAME: Final = b"dltensor"
_NAME_USED: Final = b"used_dltensor"
_NAME_VERSIONED: Final = b"dltensor_versioned"
_VERSIONED: Final = (1, 0)
_NUMPY_MAKES_VERSIONED: Final = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


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


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_capsule_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_get_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_set_name: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class _Memory:
    """Memory that belongs to ``owner``, in the words of NumPy's array interface."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, **interface}


class _Consumed:
    """A tensor that was taken over from a capsule; calls its deleter when it dies."""

    def __init__(self, managed: _ManagedTensor) -> None:
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def export(array: npt.NDArray[Any], max_version: tuple[int, int] | None = None) -> object:
    """Return a capsule over the array's memory: a versioned one, if the consumer asks for it and NumPy (2.1) can.

    If NumPy cannot, a consumer that asks for it gets a read-only array, too, though the capsule does not say so. Those
    that ask in a process with such a NumPy are like PyTorch, which passes over it anyway.

    Raises
    ------
    BufferError
        The array is read-only, and the consumer does not ask for a capsule that could say so.
    """
    is_bf16 = array.dtype == dtypes.BF16.numpy
    known = array.view(np.uint16) if is_bf16 else array  # what NumPy takes as one of its own, or as nothing at all
    asks_for_versioned = max_version is not None and max_version >= _VERSIONED
    if asks_for_versioned and _NUMPY_MAKES_VERSIONED:
        capsule = known.__dlpack__(max_version=_VERSIONED)
    elif asks_for_versioned:
        capsule = writable_alias(known).__dlpack__()
    else:
        capsule = known.__dlpack__()
    if is_bf16:
        _tensor_in(capsule).dtype.code = dtypes.BF16.dlpack_code
    if array.strides != _c_strides(array.shape, array.itemsize) and array.flags.c_contiguous:
        _straighten(capsule)
    return capsule


def writable_alias(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array over the same memory that claims to be writable, for a consumer that insists and only reads."""
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Memory(array, interface)).view(array.dtype)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))


def _straighten(capsule: object) -> None:
    """Write the strides of C order into a capsule over a C-contiguous array.

    NumPy leaves them at anything where a dimension is 0 or 1, and they do not matter. To some consumers they do.
    """
    tensor = _tensor_in(capsule)
    if not tensor.strides:
        return
    stride = 1
    for axis in reversed(range(tensor.ndim)):
        tensor.strides[axis] = stride
        stride *= tensor.shape[axis]


def mark_used(capsule: object) -> None:
    """Give a capsule the name that says that it was consumed, for a consumer that has given it a name of its own."""
    _capsule_set_name(capsule, _NAME_USED)


class _Lender:
    """What NumPy asks for memory, by keywords that not every producer knows."""

    __slots__ = ("_produce",)

    def __init__(self, produce: Callable[[], object]) -> None:
        self._produce = produce

    def __dlpack__(self, **_: Any) -> Any:
        return self._produce()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


def read(produce: Callable[[], object]) -> npt.NDArray[Any]:
    """Return what an unversioned capsule of CPU memory has, as an array to be read, without a copy.

    Parameters
    ----------
    produce : callable
        Returns the capsule. May be called twice.

    Raises
    ------
    TypeError
        As :func:`consume`.
    """
    return array_of(_Lender(produce))


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return what has ``__dlpack__``, on the host, as an array without a copy: by NumPy, or where that knows no BF16.

    Raises
    ------
    BufferError, RuntimeError, TypeError
        It does not give its memory away, or is of a data type that has no counterpart.
    """
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):
        return consume(value.__dlpack__())


def consume(capsule: object) -> npt.NDArray[Any]:
    """Take over an unversioned capsule of CPU memory and return it as an array, writable and without a copy.

    Raises
    ------
    TypeError
        It is no such capsule, or of a data type that has no counterpart in :mod:`shm_backend_utils.dtypes`.
    """
    managed = _managed_tensor(capsule)
    tensor = managed.tensor
    if tensor.device.device_type != CPU_DEVICE[0]:
        raise TypeError(f"expected CPU memory (device type 1), found device type {tensor.device.device_type}")
    dtype = _dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    _capsule_set_name(capsule, _NAME_USED)
    consumed = _Consumed(managed)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype.numpy)  # there is nothing to view, and maybe not even an address
    interface = {
        "shape": shape,
        "typestr": dtype.numpy.str,  # of BF16 nothing but its size
        "data": ((tensor.data or 0) + tensor.byte_offset, False),
        "strides": _byte_strides(tensor, dtype.itemsize),
    }
    return np.asarray(_Memory(consumed, interface)).view(dtype.numpy)


def _tensor_in(capsule: object) -> _Tensor:
    if _capsule_is_valid(capsule, _NAME_VERSIONED):
        versioned = _VersionedTensor.from_address(_capsule_get_pointer(capsule, _NAME_VERSIONED))
        tensor: _Tensor = versioned.tensor
    else:
        tensor = _managed_tensor(capsule).tensor
    return tensor


def _managed_tensor(capsule: object) -> _ManagedTensor:
    if type(capsule).__name__ != "PyCapsule" or not _capsule_is_valid(capsule, _NAME):
        raise TypeError(f"expected an unused DLPack capsule 'dltensor', found {capsule!r}")
    return _ManagedTensor.from_address(_capsule_get_pointer(capsule, _NAME))


def _dtype_of(tensor: _Tensor) -> DType:
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    for dtype in dtypes.BY_NAME.values():
        if (dtype.dlpack_code, dtype.dlpack_bits, 1) == (code, bits, lanes):
            return dtype
    raise TypeError(f"DLPack type code {code} with {bits} bits and {lanes} lanes has no counterpart in Triton")


def _byte_strides(tensor: _Tensor, itemsize: int) -> tuple[int, ...] | None:
    if not tensor.strides:
        return None
    return tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
