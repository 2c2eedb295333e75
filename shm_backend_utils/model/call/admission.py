"""What of a request's table only the model and its opened memory can tell. After this nothing is checked again."""

from __future__ import annotations

from collections.abc import Sequence

from ...dtypes import BYTES
from ...errors import BatchSizeError, TableError
from ...model_spec import BATCH_CARRIER, PATHS_PARAMETER, ModelSpec
from ...protocol.address import SLOT_PARAMETER
from ...protocol.spans import Table
from ...tensors.view import DIRECT
from ..mapping.memory import Memory

__all__ = ["check_batch_size", "check_direct_is_served", "check_table", "reshaped_inputs", "shares_no_memory"]


def check_table(spec: ModelSpec, table: Table, memories: Sequence[Memory]) -> None:
    """Check a decoded table against the model's configuration and the memory that its spans are in, by their index.

    Spans in the slot's own region are inside its data already. TensorError if the model has no such input or output, or
    takes no input of this data type and shape. TableError, which names the field, if a tensor begins at an odd address,
    lies outside of its region's data, or is one of strings on a GPU.
    """
    for name, (dtype, shape, region, offset, byte_size) in table.inputs.items():
        tensor = spec.inputs.get(name) or spec.input(name)
        if dtype is not tensor.dtype or len(shape) != len(tensor.shape) or not tensor.takes_any_size:
            tensor.check(dtype, shape)
        memory = memories[region]
        if dtype is not BYTES and (memory.address + offset) % dtype.itemsize:
            raise _odd_address(f"inputs.{name}.offset", offset, dtype.itemsize)
        if region:
            _check_inside(f"inputs.{name}", memory, offset, byte_size)
            if dtype is BYTES and memory.device is not None:
                raise TableError(f"inputs.{name}", "strings in memory of a GPU", "strings on the host")
    ring = table.ring
    stride = 0 if ring is None or ring.frames == 1 else ring.stride
    for name, (region, offset, byte_size) in table.outputs.items():
        wanted = (spec.outputs.get(name) or spec.output(name)).dtype
        memory = memories[region]
        if wanted is not None and wanted is not BYTES:
            if (memory.address + offset) % wanted.itemsize:
                raise _odd_address(f"outputs.{name}.offset", offset, wanted.itemsize)
            if stride % wanted.itemsize:
                raise _odd_address("frame_stride", stride, wanted.itemsize)
        if region:
            last_place = 0 if ring is None else (ring.frames - 1) * stride
            _check_inside(f"outputs.{name}", memory, offset, last_place + byte_size)


def reshaped_inputs(spec: ModelSpec, table: Table) -> Table:
    """Return a checked table whose inputs have the shapes that Triton would give them; ``spec`` is the requests'."""
    inputs = {name: span._replace(shape=spec.inputs[name].reshaped(span.shape)) for name, span in table.inputs.items()}
    return table._replace(inputs=inputs)


def check_direct_is_served(spec: ModelSpec, parameter: str) -> None:
    """Raise TableError if a request names memory by a parameter, and the model says that it takes none."""
    if spec.paths is not None and DIRECT not in spec.paths:
        raise TableError(parameter, "something", f"nothing: model {spec.name!r} does not serve the direct path")


def shares_no_memory(spec: ModelSpec) -> TableError:
    """Return the error for a request that names no memory, to a model that serves no other."""
    allowed = f"{PATHS_PARAMETER} of model {spec.name!r} allows only the direct path"
    return TableError(SLOT_PARAMETER, "nothing", f"the address of a slot: {allowed}")


def check_batch_size(table: Table, carried: int | None) -> None:
    """Raise BatchSizeError unless the table's inputs have as many rows as Triton's batcher was told."""
    for name, span in table.inputs.items():
        if not span.shape:
            raise BatchSizeError(name, f"tensor {name!r} has no dimension; its first one is the batch")
        rows = span.shape[0]
        if rows != carried:
            told = "none" if carried is None else f"one of {carried}"
            raise BatchSizeError(
                name,
                f"tensor {name!r} has a batch of {rows}, but the request has {told}; "
                f"send input {BATCH_CARRIER!r} with shape [{rows}, 0]",
            )


def _check_inside(field: str, memory: Memory, offset: int, byte_size: int) -> None:
    """Raise unless a span is inside the data of a further region, whose size only opening it tells."""
    if not memory.data_begin <= offset <= memory.byte_size - byte_size:
        found = f"{byte_size} bytes at offset {offset}"
        raise TableError(field, found, f"bytes from {memory.data_begin} to {memory.byte_size}, its region's data")


def _odd_address(field: str, offset: int, itemsize: int) -> TableError:
    return TableError(field, str(offset), f"a place at a multiple of {itemsize} bytes, the size of an element")
