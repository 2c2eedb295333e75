"""The tensors of one inference in a test, as given to ``shm_util``, checked before any region is made."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import TensorError, TensorShapeError, TensorTypeError
from ..gpu.arrays.device_array import DeviceArray, StridedArray
from ..gpu.arrays.imported import imported, is_on_gpu
from ..gpu.memory.access import CudaAccess
from ..gpu.runtime import PER_THREAD_STREAM
from ..tensors.strings import Strings
from ..tensors.values import host_array

__all__ = ["GivenInput", "Room", "given_inputs", "output_rooms", "region_rooms"]


class GivenInput(NamedTuple):
    """An input."""

    name: str
    dtype: dtypes.DType
    shape: tuple[int, ...]
    byte_size: int  # in shared memory
    data: npt.NDArray[np.uint8] | DeviceArray | StridedArray  # as in shared memory; or an array on a GPU, complete


class Room(NamedTuple):
    """The name of an output or a region, and how many bytes it has."""

    name: str
    byte_size: int


def given_inputs(input_list: Sequence[Any], cuda: CudaAccess | None) -> list[GivenInput]:
    """Return the inputs: each ``(name, array)``, or an array alone; without ``cuda``, none may be on a GPU."""
    _check_is_list("input_list", input_list, "(name, array) pairs")
    tensors = []
    for index, entry in enumerate(input_list):
        name, value = entry if _is_pair(entry) else (f"INPUT{index}", entry)
        tensors.append(_on_device(name, value, cuda) if is_on_gpu(value) else _on_host(name, value))
    _check_differ("input_list", [tensor.name for tensor in tensors])
    return tensors


def output_rooms(output_list: Sequence[tuple[str, int]]) -> list[Room]:
    """Return the outputs, given as ``(name, byte size)``; ValueError if one is not."""
    _check_is_list("output_list", output_list, "(name, byte size) pairs")
    for entry in output_list:
        if not _is_pair(entry):
            raise ValueError(f"output_list holds {entry!r}; expected a pair of a name and a byte size")
    tensors = [Room(name, _byte_size(size, f"output {name!r}")) for name, size in output_list]
    _check_differ("output_list", [tensor.name for tensor in tensors])
    return tensors


def region_rooms(
    inputs: Sequence[GivenInput],
    outputs: Sequence[Room],
    names: Sequence[str] | None,
    byte_sizes: Sequence[int] | None,
) -> list[Room]:
    """Return one region for each input, and then for each output; ValueError for wrong names or sizes."""
    roles = [f"input {tensor.name!r}" for tensor in inputs] + [f"output {tensor.name!r}" for tensor in outputs]
    needed = [tensor.byte_size for tensor in inputs] + [tensor.byte_size for tensor in outputs]
    if names is None:
        names = [f"input{index}" for index in range(len(inputs))] + [f"output{index}" for index in range(len(outputs))]
    if byte_sizes is None:
        byte_sizes = [max(1, size) for size in needed]  # memory has at least one byte
    for what, values in (("shm_region_names", names), ("shm_region_byte_sizes", byte_sizes)):
        _check_is_list(what, values, "one value for each tensor")
        if len(values) != len(roles):
            raise ValueError(
                f"{what} has {len(values)} values for {len(roles)} tensors; expected one for each: {', '.join(roles)}"
            )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"shm_region_names holds {name!r}; expected a name that is not empty")
    _check_differ("shm_region_names", names)
    found = []
    for role, name, given, least in zip(roles, names, byte_sizes, needed, strict=True):
        size = _byte_size(given, f"region {name!r} of {role}")
        if size < least:
            raise ValueError(
                f"{role} needs {least} bytes, but {size} were given for its region {name!r}; make that at least {least}"
            )
        found.append(Room(name, size))
    return found


def _on_device(name: str, value: Any, cuda: CudaAccess | None) -> GivenInput:
    if cuda is None:
        raise TensorError(
            name,
            f"input {name!r} lies on a GPU; expected an array on the host: copy it there, or use "
            "create_set_cuda_shm_regions",
        )
    array = imported(cuda.runtime, value, PER_THREAD_STREAM, tensor=name)  # a stream that always exists
    cuda.runtime.synchronize_device(array.device)
    return GivenInput(name, dtypes.from_numpy(array.dtype, name), array.shape, array.nbytes, array)


def _on_host(name: str, value: Any) -> GivenInput:
    array = _array(name, value)
    native = array.dtype.newbyteorder("=")
    dtype = dtypes.from_numpy(native, name)
    if dtype is dtypes.BYTES:
        data = Strings.of(name, array).encoded
    else:
        data = np.ascontiguousarray(array, native).reshape(-1).view(np.uint8)
    return GivenInput(name, dtype, array.shape, data.nbytes, data)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return host_array(name, value)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(row, np.ndarray) for row in value):
        raise TensorTypeError(
            name,
            f"input {name!r} is of type {type(value).__name__}; expected a NumPy array, or a list of arrays, its rows",
        )
    rows = [host_array(name, row) for row in value]
    return rows[0] if len(rows) == 1 else _stacked(name, rows)


def _stacked(name: str, rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    first = rows[0]
    dtype = dtypes.from_numpy(first.dtype, name)
    for row in rows:
        if row.shape != first.shape:
            raise TensorShapeError(
                name,
                f"input {name!r} has rows of shapes {list(first.shape)} and {list(row.shape)}; expected equal ones",
            )
        if dtypes.from_numpy(row.dtype, name) is not dtype:
            raise TensorTypeError(
                name, f"input {name!r} has rows of dtypes {first.dtype} and {row.dtype}; expected equal ones"
            )
    return np.stack([row.astype(object) for row in rows] if dtype is dtypes.BYTES else rows)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)


def _byte_size(value: Any, what: str) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"{what} has the byte size {value!r}; expected a positive integer")
    return size


def _check_is_list(argument: str, value: Any, of: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{argument} is of type {type(value).__name__}; expected a list of {of}")  # noqa: TRY004


def _check_differ(argument: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{argument} has the name {name!r} {names.count(name)} times; expected names that differ")
