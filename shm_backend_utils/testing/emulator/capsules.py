"""DLPack capsules, as the stub takes them over and makes them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import DType
from ...gpu.arrays.capsules import CapsuleTensor, capsule_over
from ...tensors import dlpack
from ...tensors.dlpack_structures import Consumed, ForeignMemory, c_strides, managed_tensor, rename_capsule
from .datatypes import of_dlpack
from .errors import StubDiesError, TritonModelException

if TYPE_CHECKING:
    from .tensor import Tensor

__all__ = ["CUDA_HOST", "GpuMemory", "Taken", "is_capsule", "make", "take", "take_of"]

CUDA_HOST: Final = 3
"""The device type ``kDLCUDAHost``: pinned memory of the host."""

_NUMPY_LOOPS: Final = np.lib.NumpyVersion(np.__version__) < "2.0.0"
_KNOWN_DEVICES: Final = frozenset({dlpack.CPU_DEVICE[0], dlpack.CUDA, CUDA_HOST})
set_destructor: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)
_NAME_USED: Final = b"used_dlpack"
"""What the stub names a capsule that it took over. The protocol's name would be another."""


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


def is_capsule(value: object) -> bool:
    """Return whether something is a capsule of Python."""
    return type(value).__name__ == "PyCapsule"


def take_of(tensor: Any) -> Taken:
    """Take over what a tensor of another library gives away.

    StubDiesError if it is an array of NumPy 1, whose capsules a real stub dies of; TritonModelException if it makes no
    capsule, or is on a device that the backend does not know; and errors of :func:`take`.
    """
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         "
            "or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    if isinstance(tensor, np.ndarray) and _NUMPY_LOOPS:
        raise StubDiesError(
            f"from_dlpack of an array of NumPy {np.__version__}: a real stub dies of it, as it renames NumPy's "
            "capsule, whose destructor then never ends; make the Tensor of the array itself"
        )
    device, number = tensor.__dlpack_device__()
    if device == dlpack.CUDA:
        capsule = tensor.__dlpack__(stream=number + 1)  # a stream of the stub's own, which nobody else has
    else:
        _check_device(device)
        capsule = tensor.__dlpack__(stream=None)
    taken = take(capsule)
    dlpack.mark_used(capsule)  # which nobody else has, and NumPy 2 would complain of in vain
    return taken


def take(capsule: object) -> Taken:
    """Take over a capsule.

    StubDiesError if it was used; TritonModelException if it is not in C order, or on a device that the backend does not
    know.
    """
    managed = _managed(capsule)
    tensor = managed.tensor
    shape = list(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_in_c_order(shape, tensor.strides[: tensor.ndim]):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    device = tensor.device.device_type
    _check_device(device)
    datatype = of_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    rename_capsule(capsule, _NAME_USED)
    set_destructor(capsule, None)  # which may be one that never ends at that name
    owner = Consumed(managed)
    address = (tensor.data or 0) + tensor.byte_offset
    if device == dlpack.CUDA:
        there = GpuMemory(address, owner)
        return Taken(datatype, shape, (device, tensor.device.device_id), np.empty(0, np.uint8), there)
    return Taken(datatype, shape, dlpack.CPU_DEVICE, _array_over(owner, address, shape, datatype), owner)


def make(tensor: Tensor) -> object:
    """Return a capsule over a tensor's memory, which it keeps.

    TritonModelException if it is on a GPU, and of a type that Triton does not have.
    """
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
    """Return what the stub thinks of it, which does not look at the first axis."""
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
