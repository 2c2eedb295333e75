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

__all__ = ["check_direct_is_served", "check_table", "reshaped_inputs", "shares_no_memory"]


def check_table(spec: ModelSpec, table: Table, memories: Sequence[Memory], rows: int | None = None) -> None:
    """Check a decoded table against the model's configuration and the memory that its spans are in, by their index.

    ``rows`` is what the batch carrier has said. Spans in the slot's own region are inside its data already. TensorError
    if the model has no such input or output, or takes no input of this data type and shape, or not so many rows.
    TableError, which names the field, if a tensor begins at an odd address, lies outside of its region's data, or is
    one of strings on a GPU.
    """
    is_batched = spec.max_batch_size != 0
    for name, (dtype, shape, region, offset, byte_size) in table.inputs.items():
        if is_batched and (not shape or shape[0] != rows):
            raise _other_batch_size(name, shape, rows)
        tensor = spec.inputs.get(name) or spec.input(name)
        end = shape[tensor.any_size_count :]
        if dtype is not tensor.dtype or end != tensor.fixed_end or len(shape) != len(tensor.shape):
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


def _other_batch_size(name: str, shape: tuple[int, ...], carried: int | None) -> BatchSizeError:
    """Return the error for an input that has not as many rows as Triton's batcher was told."""
    if not shape:
        return BatchSizeError(name, f"tensor {name!r} has no dimension; its first one is the batch")
    told = "none" if carried is None else f"one of {carried}"
    return BatchSizeError(
        name,
        f"tensor {name!r} has a batch of {shape[0]}, but the request has {told}; "
        f"send input {BATCH_CARRIER!r} with shape [{shape[0]}, 0]",
    )


def _check_inside(field: str, memory: Memory, offset: int, byte_size: int) -> None:
    """Raise unless a span is inside the data of a further region, whose size only opening it tells."""
    if not memory.data_begin <= offset <= memory.byte_size - byte_size:
        found = f"{byte_size} bytes at offset {offset}"
        raise TableError(field, found, f"bytes from {memory.data_begin} to {memory.byte_size}, its region's data")


def _odd_address(field: str, offset: int, itemsize: int) -> TableError:
    return TableError(field, str(offset), f"a place at a multiple of {itemsize} bytes, the size of an element")
