"""The checks of a call, which refuse tables and outputs that contradict the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import BatchSizeError, ModelError, TableError, TensorError
from ...gpu.arrays.imported import is_on_gpu
from ...model_spec import BATCH_CARRIER, PATHS_PARAMETER, ModelSpec
from ...protocol.parameters import SLOT_PARAMETER
from ...protocol.spans import Table
from ...tensors.values import whole_array
from ...tensors.view import DIRECT, TensorView
from ..mapping.memory import MappedMemory

__all__ = [
    "array_of",
    "check_direct_is_served",
    "check_output",
    "check_rows",
    "check_table",
    "may_not_write",
    "not_written",
    "shares_no_memory",
]


def check_rows(table: Table, carried: int | None) -> None:
    """Raise BatchSizeError unless every input has ``carried`` rows, the number that the batch carrier gives."""
    for name, span in table.inputs.items():
        if not span.shape or span.shape[0] != carried:
            if not span.shape:
                raise BatchSizeError(name, f"tensor {name!r} has no dimension; its first one is the batch")
            batch = "none" if carried is None else f"one of {carried}"
            raise BatchSizeError(
                name,
                f"tensor {name!r} has a batch of {span.shape[0]}, but the request has {batch}; "
                f"send input {BATCH_CARRIER!r} with shape [{span.shape[0]}, 0]",
            )


def check_table(spec: ModelSpec, table: Table, memories: Sequence[MappedMemory]) -> None:
    """Raise TensorError or TableError unless a table fits the model and ``memories``, the memory of each region."""
    for name, (dtype, shape, region, offset, byte_size) in table.inputs.items():
        tensor = spec.inputs.get(name) or spec.input(name)
        end = tensor.fixed_end
        if dtype is not tensor.dtype or len(shape) != len(tensor.shape) or (end and shape[-len(end) :] != end):
            tensor.check(dtype, shape)
        if dtype.itemsize and (memories[region].address + offset) % dtype.itemsize:
            raise _odd_address(f"inputs.{name}.offset", offset, dtype.itemsize)
        if region:
            _check_inside(f"inputs.{name}", memories[region], offset, byte_size)
            if dtype is BYTES and memories[region].device is not None:
                raise TableError(f"inputs.{name}", "strings in memory of a GPU", "strings on the host")
    ring = table.ring
    stride = 0 if ring is None or ring.frames == 1 else ring.stride
    for name, (region, offset, byte_size) in table.outputs.items():
        wanted = (spec.outputs.get(name) or spec.output(name)).dtype
        if wanted is not None and wanted.itemsize:
            if (memories[region].address + offset) % wanted.itemsize:
                raise _odd_address(f"outputs.{name}.offset", offset, wanted.itemsize)
            if stride % wanted.itemsize:
                raise _odd_address("frame_stride", stride, wanted.itemsize)
        if region:
            last_place = 0 if ring is None else (ring.frames - 1) * stride
            _check_inside(f"outputs.{name}", memories[region], offset, last_place + byte_size)


def check_direct_is_served(spec: ModelSpec, parameter: str) -> None:
    """Raise TableError for ``parameter``, which names memory, if the model does not serve the direct path."""
    if spec.paths is not None and DIRECT not in spec.paths:
        raise TableError(parameter, "a value", f"none: model {spec.name!r} does not serve the direct path")


def shares_no_memory(spec: ModelSpec) -> TableError:
    """Return the error for a request that names no shared memory, although the model serves only the direct path."""
    allowed = f"{PATHS_PARAMETER} of model {spec.name!r} allows only the direct path"
    return TableError(SLOT_PARAMETER, "nothing", f"the address of a slot: {allowed}")


def _check_inside(field: str, memory: MappedMemory, offset: int, byte_size: int) -> None:
    """Raise TableError unless a span lies in a further region's data, whose size is known only once it is open."""
    if not memory.data_begin <= offset <= memory.byte_size - byte_size:
        found = f"{byte_size} bytes at offset {offset}"
        raise TableError(field, found, f"bytes from {memory.data_begin} to {memory.byte_size}, its region's data")


def _odd_address(field: str, offset: int, itemsize: int) -> TableError:
    return TableError(field, str(offset), f"a place at a multiple of {itemsize} bytes, the size of an element")


def check_output(spec: ModelSpec, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
    """Return an output's data type; ModelError if the configuration has no output of this name, type and shape."""
    try:
        dtype = dtypes.from_numpy(numpy_dtype, name)
        spec.output(name).check(dtype, shape)
    except TensorError as error:
        raise may_not_write(error) from None
    return dtype


def may_not_write(error: TensorError) -> ModelError:
    return ModelError(f"model.py wrote an invalid output: {error}")


def not_written(spec: ModelSpec, name: str) -> ModelError:
    ways = f"call.put({name!r}, array) or call.output({name!r}, shape, dtype)"
    if spec.output(name).dtype is BYTES:
        ways = f"call.put({name!r}, strings)"
    return ModelError(
        f"output {name!r} was requested, but model.py wrote none; write it by {ways}: the return value of a "
        "function is not sent"
    )


def array_of(spec: ModelSpec, name: str, value: Any, adopt: Callable[[Any], Any]) -> Any:
    """Return the value that ``model.py`` gave for an output as a NumPy array; ``adopt`` converts a value on a GPU."""
    if type(value) is np.ndarray and value.dtype in dtypes.BY_NUMPY:
        return value
    if isinstance(value, TensorView):
        return value.array
    try:
        return adopt(value) if is_on_gpu(value) else whole_array(spec, spec.output(name), value)
    except TensorError as error:
        raise may_not_write(error) from None
