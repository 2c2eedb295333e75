"""Rows of an input as a NumPy user assigns them: cast to the dtype that is wanted, and broadcast to the shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...errors import TensorShapeError
from ..inputs.sources import Source

__all__ = ["Rows", "check_rows"]


class Rows(Source):
    """Some rows of one input.

    Unlike other sources, they take on the dtype and shape that they are declared with, by the rules of NumPy's
    assignment, ``target[i] = row``: numbers of any dtype are cast, and dimensions of 1 are repeated.

    Parameters
    ----------
    name : str
        Of the input.
    data : numpy.ndarray or list
        The rows.
    row_shape, dtype
        Of each row as the model gets it.
    """

    __slots__ = ("_data",)

    def __init__(
        self, name: str, data: npt.NDArray[Any] | list[Any], row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        shape = (len(data), *row_shape)
        super().__init__(dtypes.from_numpy(dtype, name), shape, math.prod(shape) * dtype.itemsize, ())
        self._data = data

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Assign the rows; raises what NumPy raises for values that cannot be cast."""
        if isinstance(self._data, np.ndarray):
            target[...] = self._data
        else:
            # Without stacking them first: one copy less. The dots make elements rows like others: without them, some
            # versions of NumPy take an array of one for it, and some do not.
            for index, row in enumerate(self._data):
                target[index, ...] = row


def check_rows(name: str, data: Sequence[Any] | npt.NDArray[Any], row_shape: tuple[int, ...], count: int) -> None:
    """Raise TensorShapeError unless so many rows at a time can be assigned to rows of this shape."""
    if isinstance(data, np.ndarray):
        for rows in {min(count, len(data)), len(data) % count or count}:
            _check(name, (rows, *data.shape[1:]), (rows, *row_shape))
    else:
        for row in data:
            shape = np.shape(row)
            is_array = hasattr(row, "shape")
            if len(shape) > len(row_shape) and not is_array:  # of arrays alone, NumPy leaves dimensions of 1 out
                raise _does_not_fit(name, shape, row_shape)
            _check(name, shape, row_shape)


def _check(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    significant = shape
    while len(significant) > len(wanted) and significant[0] == 1:
        significant = significant[1:]
    padded = (1,) * (len(wanted) - len(significant)) + significant
    if len(padded) != len(wanted) or any(size not in (1, want) for size, want in zip(padded, wanted, strict=True)):
        raise _does_not_fit(name, shape, wanted)


def _does_not_fit(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> TensorShapeError:
    return TensorShapeError(
        name, f"input {name!r}: {list(shape)} does not fit the shape {list(wanted)} that was registered"
    )
