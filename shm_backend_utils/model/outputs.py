"""The outputs of a call: where one is, what a user gave as one, and whether the model's configuration has it."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES, DType
from ..errors import ModelError, TensorError
from ..model_spec import ModelSpec
from ..protocol.results import OutputPlace
from ..tensors import dlpack
from ..tensors.view import TensorView
from .devices.arrays import DeviceArrays, is_on_device

__all__ = ["Output", "array_of", "check_output", "is_same_memory", "may_not_write"]


class Output(NamedTuple):
    """One output that the model has made.

    Attributes
    ----------
    place : OutputPlace
        Where it is, as results say it.
    view : TensorView
        Over its memory.
    source : array of CuPy or None
        What the model fills instead of ``view``; it is copied there when the call ends.
    was_copied : bool
        Whether it was copied to where it is.
    """

    place: OutputPlace
    view: TensorView
    source: Any = None
    was_copied: bool = False


def check_output(spec: ModelSpec, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
    """Return the data type of an output that the model makes.

    Raises
    ------
    ModelError
        The configuration has no such output, or not of this data type and shape.
    """
    tensor = spec.outputs.get(name)
    if tensor is not None and tensor.takes_any_size and len(shape) == len(tensor.shape):
        known = tensor.dtype
        if known is not None and known.numpy == numpy_dtype:
            return known
    try:
        dtype = dtypes.from_numpy(numpy_dtype, name)
        spec.output(name).check(dtype, shape)
    except TensorError as error:
        raise may_not_write(error) from None
    return dtype


def may_not_write(error: TensorError) -> ModelError:
    """Return the error of a model whose output is not what its configuration says."""
    return ModelError(f"model.py wrote an output that it may not: {error}")


def array_of(spec: ModelSpec, devices: DeviceArrays, name: str, value: Any) -> Any:
    """Return what a user gives as output ``name`` as an array of NumPy, or of CuPy if it is on a GPU."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, TensorView):
        return value.array
    if is_on_device(value):
        return devices.adopt(value)
    if hasattr(value, "__dlpack__"):
        with contextlib.suppress(BufferError, RuntimeError, TypeError):  # then maybe NumPy can do it otherwise
            return dlpack.array_of(value)
    tensor = spec.outputs.get(name)
    holds_strings = tensor is not None and tensor.dtype is BYTES
    # As strings of NumPy they would lose zeros at their end.
    return np.array(value, object) if holds_strings else np.asarray(value)


def is_same_memory(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> bool:
    """Return whether two arrays of one shape and dtype, the first of them C-contiguous, are the same elements."""
    return bool(source.flags.c_contiguous) and (
        target.__array_interface__["data"][0] == source.__array_interface__["data"][0]
    )
