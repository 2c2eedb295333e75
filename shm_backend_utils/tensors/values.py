"""Users' values as NumPy arrays on the host: clients and models convert them alike.

A value keeps its elements or is refused: nothing is silently masked, negated or cut.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dtypes import BF16, BYTES
from ..errors import TensorError, TensorShapeError, TensorTypeError, shown
from ..model_spec import ModelSpec, TensorSpec
from . import dlpack

__all__ = ["host_array", "parts_of", "untyped_array", "whole_array"]

_HOST: Final = frozenset({1, 3})  # dlpack.h: kDLCPU and kDLCUDAHost, which is pinned host memory
_JOIN: Final = ", or join the parts of a list on their GPU, for example by torch.cat, and give one tensor"
_PLAIN: Final = frozenset({bool, int, float, str, bytes})


def parts_of(spec: ModelSpec, tensor: TensorSpec, value: Any) -> list[npt.NDArray[Any]]:
    """Return a user's value for a tensor as arrays of one dtype that follow one another along the first axis.

    The value is an array of any library on the host, or a list of arrays, which are rows or parts of a batch. Or it is
    numbers, strings, or nested lists of them, which take the tensor's dtype if they fit. TensorError if the value
    cannot become the tensor.
    """
    if isinstance(value, (list, tuple)) and value and all(_is_array(part) for part in value):
        return _rows_or_parts(spec, tensor, [host_array(tensor.name, part) for part in value])
    return [host_array(tensor.name, value) if _is_array(value) else _of_numbers(tensor, value)]


def whole_array(spec: ModelSpec, tensor: TensorSpec, value: Any) -> npt.NDArray[Any]:
    """Return the parts of :func:`parts_of` as one array, in native byte order."""
    parts = parts_of(spec, tensor, value)
    return _native(parts[0] if len(parts) == 1 else np.concatenate(parts))


def host_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return any library's array as NumPy's; TensorError if it is masked, not on the host, or not readable."""
    if isinstance(value, np.ndarray):
        mask = None if value.dtype.names else getattr(value, "mask", None)
    else:
        value = _by_dlpack(name, value) if hasattr(value, "__dlpack__") else _by_numpy(name, value)
        mask = None
    if mask is not None and np.any(mask):
        raise TensorTypeError(
            name,
            f"tensor {name!r} has {np.count_nonzero(mask)} masked elements, and Triton has no masks: give the "
            "array's .filled(value), or its .data",
        )
    return value.astype(object) if value.dtype.kind == "T" else np.asarray(value)


def untyped_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return a value as NumPy converts it, in native byte order; TensorError also if an integer would change."""
    if _is_array(value):
        return _native(host_array(name, value))
    elements = _elements(name, value)
    holds_strings = any(isinstance(element, (str, bytes)) for element in elements.flat)
    if holds_strings:
        return elements
    array = np.asarray(value)
    integers = [element for element in elements.flat if isinstance(element, int | np.integer)]
    if array.dtype.kind in "fO" and (
        0 < len(integers) == elements.size or not all(_fits_fraction(each, array.dtype) for each in integers)
    ):
        raise TensorTypeError(
            name, f"tensor {name!r} holds integers that no dtype can hold with its other numbers; give an array"
        )
    return array


def _native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _is_array(value: Any) -> bool:
    if isinstance(value, np.generic | type):
        return False  # a scalar, which takes the tensor's dtype like a Python number; or an array's class
    return any(hasattr(value, name) for name in ("__dlpack__", "__array_interface__", "__array__"))


def _by_dlpack(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        device = int(value.__dlpack_device__()[0])
    except Exception as error:  # torch's tensors without memory raise ValueError
        raise _unreadable(name, value, error) from None
    if device not in _HOST:
        raise TensorError(
            name,
            f"tensor {name!r} lies on DLPack device type {device}; expected host memory: copy it there"
            f"{_JOIN if device in dlpack.ON_GPU else ''}",
        )
    dlpack.check_is_resolved(value, name)
    try:
        return dlpack.array_of(value)
    except (BufferError, RuntimeError, TypeError) as error:
        if hasattr(value, "__array__"):
            return _by_numpy(name, value)
        raise _unreadable(name, value, error) from None


def _by_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        if getattr(value, "__array_interface__", {}).get("mask") is not None:  # NumPy would ignore the mask
            raise TypeError("it has a mask")
        return np.asarray(value)
    except Exception as error:  # any error of a library that does not export its elements
        raise _unreadable(name, value, error) from None


def _unreadable(name: str, value: Any, error: Exception) -> TensorError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return TensorError(
        name, f"tensor {name!r} is a {kind} that cannot be read: {error}; give a dense array on the host"
    )


def _rows_or_parts(spec: ModelSpec, tensor: TensorSpec, parts: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    rank = len(tensor.shape)
    given, are_rows = parts, all(part.ndim == rank - 1 for part in parts)
    if are_rows:
        parts = [part[np.newaxis] for part in parts]
    first = parts[0]
    for part, other in zip(parts, given, strict=True):
        if part.ndim != rank or part.shape[1:] != first.shape[1:]:
            raise TensorShapeError(
                tensor.name,
                f"tensor {tensor.name!r} is a list of arrays of shapes {list(given[0].shape)} and {list(other.shape)}; "
                f"expected rows of {rank - 1} dimensions, or batches of {rank} that differ only in the first",
            )
        if part.dtype != first.dtype:
            raise TensorTypeError(
                tensor.name,
                f"tensor {tensor.name!r} is a list of arrays of dtypes {first.dtype} and {part.dtype}; "
                "convert them to one dtype, by array.astype(...)",
            )
    if not are_rows and len(parts) > 1 and not spec.max_batch_size:
        raise TensorShapeError(
            tensor.name,
            f"tensor {tensor.name!r} is a list of {len(parts)} arrays of {rank} dimensions, but model {spec.name!r} "
            "takes one of them at a time; call it once for each, or join them, by np.concatenate for example",
        )
    return parts


def _of_numbers(tensor: TensorSpec, value: Any) -> npt.NDArray[Any]:
    """Return nested numbers or strings as an array of the model's dtype, which must hold integers exactly."""
    elements = _elements(tensor.name, value)
    if elements.ndim == 0 and all(size in (-1, 1) for size in tensor.shape):
        elements = elements.reshape((1,) * len(tensor.shape))
    dtype = None if tensor.dtype in (None, BYTES) else tensor.dtype.numpy
    for element in elements.flat:
        if not _fits(element, dtype):
            raise TensorTypeError(
                tensor.name,
                f"tensor {tensor.name!r} holds {shown(element)}, which {tensor.config_dtype} cannot hold; pass "
                f"{'str or bytes' if dtype is None else 'numbers that fit'}, or an array"
                f"{', or leave the tensor out' if value is None else ''}",
            )
    if dtype == BF16.numpy:
        return elements.astype(np.float64).astype(dtype)  # the BF16 type cannot convert large integers
    return elements if dtype is None else elements.astype(dtype)


def _elements(name: str, value: Any) -> npt.NDArray[np.object_]:
    plain = _plain(name, value)
    try:
        elements = np.array(plain, dtype=object)
    except ValueError:
        elements = np.array([[]], dtype=object)
        is_rectangular = False
    else:
        is_rectangular = not any(isinstance(element, (list, tuple)) for element in elements.flat)
    if not is_rectangular:
        raise TensorShapeError(name, f"tensor {name!r} is a nested list that is not rectangular; pad its rows")
    return elements


def _plain(name: str, value: Any) -> Any:
    """Return a nested list with its arrays checked and converted: NumPy would drop masks."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, each) for each in value]
    return host_array(name, value)[()] if _is_array(value) else value


def _fits(element: Any, dtype: np.dtype[Any] | None) -> bool:
    """Return whether the dtype can hold an element; None means strings."""
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
    return math.isfinite(made) == bool(np.isfinite(element))  # math.isfinite takes a large long double for infinite


def _fits_integer(element: Any, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    if not isinstance(element, int | np.integer) and not math.isfinite(element):
        return False
    return int(element) == element and limits.min <= int(element) <= limits.max
