"""Python's numbers and strings as tensors: each keeps its value, or is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import BF16, BYTES
from ...errors import TensorShapeError, TensorTypeError, shown
from ...model_spec import TensorSpec

__all__ = ["array_of_numbers"]


def array_of_numbers(tensor: TensorSpec, value: Any) -> npt.NDArray[Any]:
    """Return a number, a string or a nested list of these as an array of the model's dtype; object for strings.

    Raises
    ------
    TensorError
        The list is not rectangular, or an element is nothing that this dtype can hold: integers must fit exactly,
        fractions as near as can be.
    """
    elements = _elements(tensor, value)
    if elements.ndim == 0 and all(size in (-1, 1) for size in tensor.shape):
        elements = elements.reshape((1,) * len(tensor.shape))
    dtype = None if tensor.dtype in (None, BYTES) else tensor.dtype.numpy
    for element in elements.flat:
        if not _fits(element, dtype):
            raise TensorTypeError(
                tensor.name,
                f"input {tensor.name!r} holds {shown(element)}, which is no value of {tensor.config_dtype}; pass "
                f"{'str or bytes' if dtype is None else 'numbers that are'}, or an array",
            )
    if dtype == BF16.numpy:
        return elements.astype(np.float64).astype(dtype)  # it takes no large integers
    return elements if dtype is None else elements.astype(dtype)


def _elements(tensor: TensorSpec, value: Any) -> npt.NDArray[np.object_]:
    try:
        elements = np.array(value, dtype=object)
    except ValueError:
        elements = np.array([[]], dtype=object)
        is_rectangular = False
    else:
        is_rectangular = not any(isinstance(element, (list, tuple)) for element in elements.flat)
    if not is_rectangular:
        raise TensorShapeError(tensor.name, f"input {tensor.name!r} is a nested list that is not rectangular")
    return elements


def _fits(element: Any, dtype: np.dtype[Any] | None) -> bool:
    """Return whether the dtype can hold an element; None stands for strings."""
    if dtype is None:
        return isinstance(element, (str, bytes))
    if dtype.kind == "b" or isinstance(element, bool | np.bool_):
        return dtype.kind == "b" and isinstance(element, bool | np.bool_)
    if not isinstance(element, int | float | np.integer | np.floating):
        return False
    if dtype == BF16.numpy:
        return dtype.name == "bfloat16" and _fits_fraction(element, dtype)
    return _fits_fraction(element, dtype) if dtype.kind == "f" else _fits_integer(element, dtype)


def _fits_fraction(element: Any, dtype: np.dtype[Any]) -> bool:
    try:
        with np.errstate(over="ignore"):
            made = float(np.float64(element).astype(dtype))
    except OverflowError:
        return False
    if isinstance(element, int | np.integer):
        return made == int(element)
    return math.isfinite(made) == math.isfinite(element)


def _fits_integer(element: Any, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    if not isinstance(element, int | np.integer) and not math.isfinite(element):
        return False
    return int(element) == element and limits.min <= int(element) <= limits.max
