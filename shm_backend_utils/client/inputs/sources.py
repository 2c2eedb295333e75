"""What users pass as inputs, made ready to be written where it belongs, in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES, DType
from ...errors import TensorTypeError, shown
from ...model_spec import ModelSpec, TensorSpec
from ...tensors.strings import Strings
from ...tensors.values import parts_of
from .descriptions import is_description, nameless

__all__ = ["SAME_VALUES", "Elsewhere", "Source", "StringSource", "sources"]

_STRINGS: Final = frozenset("OSU")
SAME_VALUES: Final = "safe"
"""How arrays are copied: from another byte order, or strings to objects; dtypes were compared before."""
_OBJECT: Final = np.dtype(object)


@dataclass(slots=True, eq=False, repr=False)
class Source:
    """One input as the user holds it."""

    dtype: DType
    shape: tuple[int, ...]  # as the model gets it
    byte_size: int
    parts: Sequence[npt.NDArray[Any]]  # one after another along the first axis; in any memory order and byte order
    device: int | None = None  # this process' number of the GPU that it is on; None for the host
    is_lent: bool = False  # used where it is, on a GPU; nothing on the host is

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Source:
        """Return an array as a source; raise TensorTypeError if its dtype has no counterpart."""
        return cls(dtypes.from_numpy(_native(array.dtype), name), array.shape, array.nbytes, (array,))

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Copy the tensor, once. ``target`` has its shape and dtype."""
        if len(self.parts) == 1:
            np.copyto(target, self.parts[0], casting=SAME_VALUES)
            return
        begin = 0
        for part in self.parts:
            end = begin + len(part)
            np.copyto(target[begin:end], part, casting=SAME_VALUES)
            begin = end


class StringSource(Source):
    """Strings."""

    __slots__ = ("encoded",)

    def __init__(self, name: str, source: Source) -> None:
        pieces = [Strings.of(name, part).encoded for part in source.parts]
        self.encoded = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)  # as they lie in memory
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
    """Look at every input of a call: each what :func:`.parts_of` takes, or a source, which stays as it is.

    CallerError if they have no names; TensorError if the model has no such input, or it cannot be made of this value.
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
    if is_description(value):
        raise TensorTypeError(
            tensor.name,
            f"input {tensor.name!r} is {shown(value)}: shape and dtype, which prepare() takes; give the array itself",
        )
    parts = parts_of(spec, tensor, value)
    shape = (sum(map(len, parts)), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape
    dtype = dtypes.from_numpy(_native(parts[0].dtype), tensor.name)
    source = Source(dtype, shape, sum(part.nbytes for part in parts), parts)
    return StringSource(tensor.name, source) if tensor.dtype is BYTES is dtype else source


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _OBJECT if dtype.kind in _STRINGS else dtype.newbyteorder("=")
