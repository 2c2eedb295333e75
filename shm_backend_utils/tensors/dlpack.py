"""DLPack capsules where NumPy's own support ends: writable arrays, BF16, and consumers that break the protocol.

NumPy makes the capsules, because destructors must be compiled: one in Python that runs while an exception is being
raised loses that. A consumer renames a capsule "dltensor" to "used_dltensor", and then owns its tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import TensorTypeError
from .dlpack_structures import (
    NAME_USED,
    NUMPY_MAKES_VERSIONED,
    VERSION,
    Consumed,
    ForeignMemory,
    byte_strides,
    c_strides,
    dtype_of,
    managed_tensor,
    rename_capsule,
    straighten,
    tensor_in,
)

__all__ = [
    "CPU_DEVICE",
    "CUDA",
    "CUDA_MANAGED",
    "ON_GPU",
    "array_of",
    "check_is_resolved",
    "consume",
    "export",
    "mark_used",
    "read",
    "writable_alias",
]

CPU_DEVICE: Final = (1, 0)
"""``(kDLCPU, 0)``, as ``__dlpack_device__`` returns it."""

CUDA: Final = 2
"""The device type ``kDLCUDA``."""

CUDA_MANAGED: Final = 13
"""The device type ``kDLCUDAManaged``: unified memory."""

ON_GPU: Final = frozenset({CUDA, CUDA_MANAGED})
"""The devices that CUDA can copy from."""


def export(array: npt.NDArray[Any], max_version: tuple[int, int] | None = None) -> object:
    """Return a capsule over the array's memory, versioned if the consumer asks for it and NumPy (2.1) makes such.

    An older NumPy gives out a read-only array all the same. BufferError if it is read-only and no versioned one is
    asked for.
    """
    is_bf16 = array.dtype == dtypes.BF16.numpy
    known = array.view(np.uint16) if is_bf16 else array  # what NumPy takes as one of its own, or as nothing at all
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
    """Return an array over the same memory that claims to be writable, for a consumer that insists and only reads."""
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(ForeignMemory(array, interface)).view(array.dtype)


def mark_used(capsule: object) -> None:
    """Give a capsule the name that says that it was consumed, for a consumer that has given it a name of its own."""
    rename_capsule(capsule, NAME_USED)


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
    """Return the unversioned capsule of CPU memory that ``produce`` makes, maybe twice, as a read-only array."""
    return array_of(_Lender(produce))


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a host object's memory as an array; BufferError, RuntimeError or TypeError if it gives none."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):
        return consume(value.__dlpack__())


def check_is_resolved(value: Any, tensor: str) -> None:
    """Raise TensorTypeError for a tensor of torch that is negated or zero where it is read: capsules do not say so."""
    if hasattr(value, "resolve_neg") and value.is_neg():
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} lies in memory with the wrong sign (torch's is_neg()); give value.resolve_neg()"
        )
    if hasattr(value, "_is_zerotensor") and value._is_zerotensor():
        raise TensorTypeError(
            tensor, f"tensor {tensor!r} has zeros that lie nowhere (torch's _is_zerotensor()); give value.clone()"
        )


def consume(capsule: object) -> npt.NDArray[Any]:
    """Take over an unversioned capsule of CPU memory as a writable array; TypeError if it is no such capsule."""
    managed = managed_tensor(capsule)
    tensor = managed.tensor
    if tensor.device.device_type != CPU_DEVICE[0]:
        raise TypeError(f"expected CPU memory (device type 1), found device type {tensor.device.device_type}")
    dtype = dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    rename_capsule(capsule, NAME_USED)
    consumed = Consumed(managed)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype.numpy)  # there is nothing to view, and maybe not even an address
    interface = {
        "shape": shape,
        "typestr": dtype.numpy.str,  # of BF16 nothing but its size
        "data": ((tensor.data or 0) + tensor.byte_offset, False),
        "strides": byte_strides(tensor, dtype.itemsize),
    }
    return np.asarray(ForeignMemory(consumed, interface)).view(dtype.numpy)
