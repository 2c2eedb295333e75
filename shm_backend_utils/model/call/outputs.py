"""The outputs of a call: where one is, what a user gave as one, and whether the model's configuration has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import ModelError, TensorError
from ...model_spec import ModelSpec
from ...tensors.cuda.imported import is_on_gpu
from ...tensors.values import whole_array
from ...tensors.view import TensorView

__all__ = ["Output", "array_of", "check_output", "may_not_write", "not_written"]


class Output(NamedTuple):
    """One output that the model has made."""

    view: TensorView  # over its memory
    encoded: bytes = b""  # as results have it; made at the end for what is in the response
    region: int | None = None  # that it lies in; None if it goes back through Triton
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
