"""What users pass as inputs, made ready to be written where it belongs, in one copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import TensorError, TensorShapeError, TensorTypeError
from ...model_spec import ModelSpec, TensorSpec
from ...tensors import dlpack
from ...tensors.strings import Strings
from .descriptions import nameless
from .literals import array_of_numbers

__all__ = ["Elsewhere", "Source", "StringSource", "sources"]

_HOST: Final = frozenset({1, 3})  # dlpack.h: kDLCPU and kDLCUDAHost, which is pinned host memory
_JOIN: Final = ", or join what is in a list on its GPU, for example by torch.cat, and give one tensor"
_STRINGS: Final = frozenset("OSU")
_SAME_VALUES: Final = "safe"  # another byte order, or strings to objects; dtypes were compared before
_OBJECT: Final = np.dtype(object)


@dataclass(slots=True, eq=False, repr=False)
class Source:
    """One input as the user holds it.

    Attributes
    ----------
    dtype : DType
    shape : tuple of int
        As the model gets it.
    byte_size : int
        Of the tensor.
    parts : sequence of numpy.ndarray
        What lies one after another along the first axis; in any memory order and byte order.
    device : int or None
        This process' number of the GPU that it is on; None for the host.
    is_lent : bool
        Whether it is used where it is, on a GPU; nothing on the host is.
    """

    dtype: DType
    shape: tuple[int, ...]
    byte_size: int
    parts: Sequence[npt.NDArray[Any]]
    device: int | None = None
    is_lent: bool = False

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Source:
        """Return an array as a source; raise TensorTypeError if its dtype has no counterpart."""
        return cls(dtypes.from_numpy(_native(array.dtype), name), array.shape, array.nbytes, (array,))

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Copy the tensor, once. ``target`` has its shape and dtype."""
        if len(self.parts) == 1:
            np.copyto(target, self.parts[0], casting=_SAME_VALUES)
            return
        begin = 0
        for part in self.parts:
            end = begin + len(part)
            np.copyto(target[begin:end], part, casting=_SAME_VALUES)
            begin = end


class StringSource(Source):
    """Strings.

    Attributes
    ----------
    encoded : numpy.ndarray of uint8
        As they lie in memory.
    """

    __slots__ = ("encoded",)

    def __init__(self, name: str, source: Source) -> None:
        pieces = [Strings.of(name, part).encoded for part in source.parts]
        self.encoded = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        super().__init__(BYTES, source.shape, self.encoded.nbytes, source.parts)

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Copy the strings, as objects or as bytes."""
        if target.dtype == _OBJECT:
            super().write_to(target)
        else:
            target[: self.encoded.nbytes] = self.encoded


Elsewhere = Callable[[str, Any, Mapping[str, Source]], Source | None]
"""Takes name and value of an input, and the inputs found before; returns a source if it is not on the host."""


def _on_host(name: str, value: Any, found: Mapping[str, Source]) -> None:
    return None


def sources(spec: ModelSpec, inputs: Mapping[str, Any], elsewhere: Elsewhere = _on_host) -> dict[str, Source]:
    """Look at every input of a call.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    inputs : mapping
        Name to one of these, on the host:

        - a NumPy array, or what has ``__dlpack__``, ``__array_interface__`` or ``__array__``;
        - a list or tuple of such: rows, if each has one dimension less than the input; else parts of a batch;
        - a source, as it is;
        - Python numbers, strings and nested lists of them, which take the model's dtype if they fit it. One number
          serves an input whose dimensions may all be 1.
    elsewhere : callable, optional
        See :data:`Elsewhere`.

    Raises
    ------
    CallerError
        The inputs have no names.
    TensorError
        The model has no such input, or it cannot be made of this value.
    """
    found: dict[str, Source] = {}
    try:
        named = inputs.items()
    except AttributeError:
        raise nameless(inputs, "array") from None
    for name, value in named:
        dtype = dtypes.BY_NUMPY.get(value.dtype) if type(value) is np.ndarray else None
        if dtype is not None and dtype is not BYTES:
            found[name] = Source(dtype, value.shape, value.nbytes, (value,))  # nearly always
        elif isinstance(value, Source):
            found[name] = value
        else:
            found[name] = elsewhere(name, value, found) or _source(spec, spec.input(name), value)
    return found


def _source(spec: ModelSpec, tensor: TensorSpec, value: Any) -> Source:
    if isinstance(value, (list, tuple)) and value and all(_is_array(part) for part in value):
        source = _of_parts(spec, tensor, [_array(tensor, part) for part in value])
    else:
        array = _array(tensor, value) if _is_array(value) else array_of_numbers(tensor, value)
        source = Source.of(tensor.name, array)
    return StringSource(tensor.name, source) if tensor.dtype is BYTES is source.dtype else source


def _is_array(value: Any) -> bool:
    if isinstance(value, np.generic):
        return False  # a number, which takes the model's dtype like one of Python's
    return any(hasattr(value, name) for name in ("__dlpack__", "__array_interface__", "__array__"))


def _array(tensor: TensorSpec, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        device, _ = value.__dlpack_device__()
        if device not in _HOST:
            raise TensorError(
                tensor.name,
                f"input {tensor.name!r} lies on DLPack device type {int(device)}; expected host memory: copy it there"
                f"{_JOIN if device in dlpack.ON_GPU else ''}",
            )
        try:
            return dlpack.array_of(value)
        except (BufferError, RuntimeError, TypeError) as error:
            return _array_without_dlpack(tensor, value, error)
    return np.asarray(value)


def _array_without_dlpack(tensor: TensorSpec, value: Any, error: Exception) -> npt.NDArray[Any]:
    if hasattr(value, "__array__"):
        with contextlib.suppress(RuntimeError, TypeError):
            return np.asarray(value)
    raise TensorError(tensor.name, f"input {tensor.name!r} cannot be read by DLPack: {error}") from None


def _of_parts(spec: ModelSpec, tensor: TensorSpec, parts: list[npt.NDArray[Any]]) -> Source:
    rank = len(tensor.shape)
    are_rows = all(part.ndim == rank - 1 for part in parts)
    if are_rows:
        parts = [part[np.newaxis] for part in parts]
    first = parts[0]
    for part in parts:
        if part.ndim != rank or part.shape[1:] != first.shape[1:]:
            raise TensorShapeError(
                tensor.name,
                f"input {tensor.name!r} is a list of arrays of shapes {list(first.shape)} and {list(part.shape)}; "
                f"expected rows of {rank - 1} dimensions, or batches of {rank}, that are equal but for the first",
            )
        if part.dtype != first.dtype:
            raise TensorTypeError(
                tensor.name, f"input {tensor.name!r} is a list of arrays of dtypes {first.dtype} and {part.dtype}"
            )
    if not are_rows and len(parts) > 1 and not spec.max_batch_size:
        raise TensorShapeError(
            tensor.name,
            f"input {tensor.name!r} is a list of {len(parts)} arrays of {rank} dimensions, but model {spec.name!r} "
            "takes one of them at a time; call it once for each, or join them, by np.concatenate for example",
        )
    dtype, shape = (
        dtypes.from_numpy(_native(first.dtype), tensor.name),
        (sum(len(part) for part in parts), *first.shape[1:]),
    )
    return Source(dtype, shape, sum(part.nbytes for part in parts), parts)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _OBJECT if dtype.kind in _STRINGS else dtype.newbyteorder("=")
