"""DLPack capsules over GPU memory: exported, or imported.

NumPy makes the capsules, because destructors must be compiled code. NumPy gets the address, but never reads there. Then
this module writes the device and the data type, which NumPy cannot know, into the capsule.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from ... import dtypes
from ...tensors import dlpack
from ...tensors.dlpack import (
    NAME_USED,
    NAME_USED_VERSIONED,
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
    versioned_tensor,
)

__all__ = ["CapsuleTensor", "TakenOver", "capsule_over", "taken_over"]

_READ_ONLY: Final = 1
_ANYWHERE: Final = 256
"""The address that NumPy gets for an array without elements, as some versions refuse 0."""


class CapsuleTensor(NamedTuple):
    """Elements on a GPU, as a capsule describes them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: np.dtype[Any]
    device_type: int  # DLPack's number; device is DLPack's, too
    device: int
    is_read_only: bool


class TakenOver(NamedTuple):
    """The memory of a capsule, and the object that keeps it."""

    memory: CapsuleTensor
    owner: object


def capsule_over(memory: CapsuleTensor, owner: object, max_version: tuple[int, int] | None) -> object:
    """Return a capsule over C-contiguous memory: a versioned one if the consumer asks for it and NumPy (2.1) can.

    Only a versioned capsule can mark memory as read-only, and PyTorch and CuPy ignore that. JAX asks for unversioned
    capsules only. So read-only memory gets one, too: no known consumer of GPU memory respects the mark.

    The owner lives until the capsule and its consumer are gone; ``max_version`` is the newest that the consumer knows.
    """
    row = dtypes.BY_NUMPY[memory.dtype]
    is_versioned = NUMPY_MAKES_VERSIONED and max_version is not None and max_version >= VERSION
    interface = {
        "shape": memory.shape,
        "typestr": f"=u{row.itemsize}",  # some NumPy versions refuse the other types
        "data": (memory.address or _ANYWHERE, memory.is_read_only and is_versioned),
    }
    words = np.asarray(ForeignMemory(owner, interface))
    capsule: object = words.__dlpack__(max_version=VERSION) if is_versioned else words.__dlpack__()
    tensor = tensor_in(capsule)
    tensor.data = memory.address
    tensor.device.device_type, tensor.device.device_id = memory.device_type, memory.device
    tensor.dtype.code = row.dlpack_code
    straighten(tensor)
    return capsule


def taken_over(capsule: object) -> TakenOver:
    """Take over an unused capsule of either kind over GPU memory.

    TypeError for anything else, for a newer version, and for a data type that :mod:`shm_backend_utils.dtypes` lacks;
    the capsule is unchanged then.
    """
    versioned = versioned_tensor(capsule)
    if versioned is not None and versioned.version[0] > VERSION[0]:
        raise TypeError(f"expected a DLPack capsule of version {VERSION[0]}, found version {versioned.version[0]}")
    managed = versioned or managed_tensor(capsule)
    tensor = managed.tensor
    if tensor.device.device_type not in dlpack.ON_GPU:
        raise TypeError(
            f"expected memory of a GPU (device type 2 or 13), found device type {tensor.device.device_type}"
        )
    dtype = dtype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    memory = CapsuleTensor(
        (tensor.data or 0) + tensor.byte_offset if math.prod(shape) else 0,
        shape,
        byte_strides(tensor, dtype.itemsize) or c_strides(shape, dtype.itemsize),
        dtype.numpy,
        tensor.device.device_type,
        tensor.device.device_id,
        versioned is not None and bool(versioned.flags & _READ_ONLY),
    )
    rename_capsule(capsule, NAME_USED if versioned is None else NAME_USED_VERSIONED)
    return TakenOver(memory, Consumed(managed))
