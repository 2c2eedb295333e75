"""The outputs of a call: where one is, what a user gave as one, and whether the model's configuration has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import ModelError, TensorError
from ...model_spec import ModelSpec
from ...protocol.results import OutputPlace
from ...protocol.spans import InputSpan, OutputSpan
from ...tensors.cuda.imported import is_on_gpu
from ...tensors.strings import Strings
from ...tensors.values import whole_array
from ...tensors.view import TensorView
from ..mapping.memory import HostMemory, Memory

__all__ = [
    "Output",
    "array_of",
    "check_output",
    "copy_on_host",
    "in_response",
    "may_not_write",
    "not_written",
    "passed_through",
    "view_at",
    "write_strings",
]


class Output(NamedTuple):
    """One output that the model has made."""

    place: OutputPlace  # as results say it
    view: TensorView  # over its memory
    source: Any = None  # a DeviceArray that the model fills instead; copied when the call ends
    was_copied: bool = False  # to where it is


def check_output(spec: ModelSpec, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
    """Return the data type of an output that the model makes."""
    try:
        dtype = dtypes.from_numpy(numpy_dtype, name)
        spec.output(name).check(dtype, shape)
    except TensorError as error:
        raise may_not_write(error) from None
    return dtype


def may_not_write(error: TensorError) -> ModelError:
    """Return the error of a model whose output is not what its configuration says."""
    return ModelError(f"model.py wrote an output that it may not: {error}")


def not_written(spec: ModelSpec, name: str) -> ModelError:
    """Return the error for a requested output that ``model.py`` has not written."""
    ways = f"call.put({name!r}, array) or call.output({name!r}, shape, dtype)"
    if spec.output(name).dtype is BYTES:
        ways = f"call.put({name!r}, strings)"
    return ModelError(
        f"output {name!r} was requested, but model.py wrote none; write it by {ways}: what a function returns is not "
        "sent"
    )


def array_of(spec: ModelSpec, name: str, value: Any, adopt: Callable[[Any], Any]) -> Any:
    """Return what a user gives as output ``name`` as an array of NumPy, or, if it is on a GPU, as ``adopt`` has it."""
    if type(value) is np.ndarray and value.dtype in dtypes.BY_NUMPY:
        return value
    if isinstance(value, TensorView):
        return value.array
    try:
        return adopt(value) if is_on_gpu(value) else whole_array(spec, spec.output(name), value)
    except TensorError as error:
        raise may_not_write(error) from None


def in_response(name: str, view: TensorView, dtype: DType) -> Output:
    """Return an output that goes back through Triton; the view may be an input's, of another name."""
    return Output(OutputPlace(name, dtype, view.shape, 0, 0, 0, True), view, None, True)


def view_at(memory: Memory, place: OutputPlace, *, writable: bool) -> TensorView:
    """Return a tensor of the client's memory, for which there is enough at its place."""
    name, dtype, shape, _, offset, byte_size, _ = place
    view = memory.view(name, offset, byte_size, dtype, shape, writable=writable)
    assert view is not None  # its size was compared, and strings on a GPU refused
    return view


def passed_through(
    name: str,
    dtype: DType,
    source: Any,
    shape: tuple[int, ...],
    inputs: Iterable[InputSpan],
    memories: Sequence[Memory],
) -> Output | None:
    """Return an output that *is* memory of an input, so that nothing is copied; None if ``source`` is no such memory.

    Of strings, ``source`` has the bytes.
    """
    nbytes, itemsize = source.nbytes, dtype.itemsize or 1
    if not nbytes:
        return None
    for span in inputs:
        memory = memories[span.region]
        offset = memory.offset_of(source)
        if offset is None or offset % itemsize:  # bytes that are read as larger elements may lie at odd places
            continue
        if span.offset <= offset and offset + nbytes <= span.offset + span.byte_size:
            place = OutputPlace(name, dtype, shape, span.region, offset, nbytes, False)
            return Output(place, view_at(memory, place, writable=False))
    return None


def write_strings(name: str, strings: Strings, span: OutputSpan, memory: Memory) -> Output | None:
    """Copy strings to the client's memory and return them as an output; None if there is no room for them."""
    try:
        encoded = strings.packed()
    except TensorError as error:
        raise may_not_write(error) from None
    size = len(encoded)
    if size > span.byte_size or not isinstance(memory, HostMemory):
        return None
    begin = memory.begin + span.offset
    memory.array[begin : begin + size] = np.frombuffer(encoded, np.uint8)
    view = memory.view(name, span.offset, size, BYTES, strings.shape, writable=True)
    assert view is not None
    return Output(OutputPlace(name, BYTES, strings.shape, span.region, span.offset, size, False), view, None, True)


def copy_on_host(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> bool:
    """Copy elements to a C-contiguous array, unless they are that very memory; return whether they were not."""
    if source.flags.c_contiguous and (target.__array_interface__["data"][0] == source.__array_interface__["data"][0]):
        return False
    np.copyto(target, source)
    return True
