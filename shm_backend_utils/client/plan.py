"""A call laid out: which tensors it has, what must be true of them, and where each goes in a slot. No I/O."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..descriptor import InputSpan, OutputSpan
from ..errors import BatchSizeError, MissingTensorError, TensorError, TensorShapeError, TensorTypeError
from ..spec import ModelSpec, TensorSpec

__all__ = ["CallPlan", "OutputHint", "Signature", "plan", "rows_of", "signature", "wanted_outputs"]

OutputHint = int | tuple[tuple[int, ...], npt.DTypeLike] | None
"""Room to keep for an output: bytes, or a shape and a dtype; None if the user does not know."""

_ALIGNMENT: Final = 256
"""Every tensor begins at a multiple of this in its region, which is what ``dlpack.h`` asks of producers."""
_STRINGS: Final = np.dtype(object)


class Signature(NamedTuple):
    """A call without its data. Hashable: calls with one signature have one plan.

    Attributes
    ----------
    inputs : tuple of (name, shape, dtype)
    outputs : tuple of (name, bytes or None), or None
        What is wanted, with the bytes hinted at; None for all.
    """

    inputs: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    outputs: tuple[tuple[str, int | None], ...] | None


@dataclass(frozen=True, eq=False)
class CallPlan:
    """Where a call's tensors go, as offsets from the beginning of a slot's data.

    Attributes
    ----------
    inputs : mapping of str to InputSpan
        Those that lie in the slot.
    in_band : mapping of str to (shape, dtype)
        Those that travel with the request: data types without a fixed size.
    outputs : mapping of str to OutputSpan
        Room for what is wanted; those that cannot be in a slot are missing.
    certain : frozenset of str
        Outputs whose room is certain to do: it follows from the configuration, or the user vouched for it.
    requested : tuple of str or None
        As the user said; None for all.
    """

    spec: ModelSpec
    signature: Signature
    batch_size: int | None
    inputs: Mapping[str, InputSpan]
    in_band: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    outputs: Mapping[str, OutputSpan]
    certain: frozenset[str]
    requested: tuple[str, ...] | None
    byte_size: int

    @cached_property
    def input_byte_size(self) -> int:
        """Bytes of all inputs in the slot."""
        return sum(span.byte_size for span in self.inputs.values())

    @property
    def wanted(self) -> Iterable[str]:
        """The names of all outputs that the call is to give."""
        return self.spec.outputs if self.requested is None else self.requested


def wanted_outputs(
    outputs: Sequence[str] | Mapping[str, OutputHint] | None,
) -> tuple[tuple[str, int | None], ...] | None:
    """Return the outputs of a signature.

    Raises
    ------
    TensorError
        A hint is no number of bytes, and no shape and dtype.
    """
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        return tuple([(name, _hinted(name, hint)) for name, hint in outputs.items()])
    if isinstance(outputs, str):
        raise TensorError(outputs, f"outputs is the string {outputs!r}; expected a list of names, or a mapping")
    return tuple([(name, None) for name in outputs])


def signature(
    inputs: Iterable[tuple[str, Sequence[int], npt.DTypeLike]],
    outputs: Sequence[str] | Mapping[str, OutputHint] | None,
) -> Signature:
    """Return the signature of a call as a user describes it.

    Raises
    ------
    TensorError
        A shape has a size that is no number of 0 or more; or as :func:`wanted_outputs`.
    """
    described = tuple([(name, _checked_shape(name, shape), np.dtype(dtype)) for name, shape, dtype in inputs])
    return Signature(described, wanted_outputs(outputs))


def plan(spec: ModelSpec, call: Signature, learned: Mapping[str, int], *, most_rows: int) -> CallPlan:
    """Check a call against the model's configuration, and lay it out.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    call : Signature
        What the call has and wants.
    learned : mapping of str to int
        Bytes per row that outputs needed before, used where neither a hint nor the configuration tells.
    most_rows : int
        How many rows the call may have; more than the model takes at once if it will be split.

    Raises
    ------
    TensorError
        The model does not take these tensors.
    """
    cursor = 0
    spans, in_band = {}, {}
    for name, shape, numpy_dtype in call.inputs:
        tensor = spec.input(name)
        if tensor.dtype is None:
            in_band[name] = (shape, _dtype_in_band(tensor, numpy_dtype))
            tensor.check_shape(shape)
            continue
        dtype = dtypes.from_numpy(numpy_dtype, name)
        tensor.check(dtype, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        spans[name] = InputSpan(0, cursor, nbytes, dtype, shape)
        cursor = _aligned(cursor + nbytes)
    _check_none_is_missing(spec, {name for name, _, _ in call.inputs})
    batch_size = _batch_size(spec, call, most_rows)
    hints = dict(call.outputs or ())
    outputs, certain = {}, set()
    for name in spec.outputs if call.outputs is None else hints:
        tensor = spec.output(name)
        if tensor.dtype is None:
            continue
        known, hint = tensor.nbytes(batch_size), hints.get(name)
        if known is not None or hint is not None:
            certain.add(name)
        rows = 1 if batch_size is None else batch_size
        room = hint if hint is not None else learned.get(name, 0) * rows if known is None else known
        outputs[name] = OutputSpan(0, cursor, room)
        cursor = _aligned(cursor + room)
    requested = None if call.outputs is None else tuple(hints)
    return CallPlan(spec, call, batch_size, spans, in_band, outputs, frozenset(certain), requested, cursor)


def rows_of(whole: CallPlan, begin: int, end: int) -> CallPlan:
    """Return the plan of some rows of a call, in the same place. Every input must lie in the slot.

    Where rows of an output have no certain size, each row gets the same share of the room.
    """
    assert whole.batch_size is not None
    rows, count = whole.batch_size, end - begin
    inputs, outputs = {}, {}
    for name, span in whole.inputs.items():
        row_size = span.byte_size // rows
        offset, byte_size = span.offset + begin * row_size, count * row_size
        inputs[name] = InputSpan(0, offset, byte_size, span.dtype, (count, *span.shape[1:]))
    for name, room in whole.outputs.items():
        row_size = room.byte_size // rows
        outputs[name] = OutputSpan(0, room.offset + begin * row_size, count * row_size)
    return replace(whole, batch_size=count, inputs=inputs, outputs=outputs)


def _batch_size(spec: ModelSpec, call: Signature, most: int) -> int | None:
    if spec.max_batch_size == 0:
        return None
    sizes = {name: shape[0] for name, shape, _ in call.inputs}
    if not sizes:
        raise MissingTensorError(
            "", f"model {spec.name!r} takes batches, and its inputs tell how large; found no input"
        )
    name, size = next(iter(sizes.items()))
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BatchSizeError(name, f"inputs of one request must have one batch size; found {found}")
    if not 1 <= size <= most:
        raise BatchSizeError(
            name,
            f"tensor {name!r} has a batch of {size}, but model {spec.name!r} takes 1 to {most}"
            f"{'; split=True sends several requests' if size else ''}",
        )
    return size


def _check_none_is_missing(spec: ModelSpec, given: set[str]) -> None:
    for name, tensor in spec.inputs.items():
        if not tensor.optional and name not in given:
            raise MissingTensorError(name, f"model {spec.name!r} needs input {name!r}, which the call does not have")


def _dtype_in_band(tensor: TensorSpec, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if tensor.config_dtype == "TYPE_BF16":
        if dtype.name == "bfloat16":
            return dtype
        expected = "bfloat16 of the package ml_dtypes"
    else:
        if dtype.kind in "OSU":
            return _STRINGS
        expected = "object"
    raise TensorTypeError(
        tensor.name,
        f"tensor {tensor.name!r} has NumPy dtype {dtype}, but the model's configuration says {tensor.config_dtype}, "
        f"for which it must be {expected}",
    )


def _hinted(name: str, hint: object) -> int | None:
    if hint is None:
        return None
    if isinstance(hint, int | np.integer) and hint >= 0:
        return int(hint)
    if isinstance(hint, tuple) and len(hint) == 2:
        shape, dtype = hint
        return math.prod(_checked_shape(name, shape)) * dtypes.from_numpy(dtype, name).itemsize
    raise TensorError(
        name, f"the hint for output {name!r} is {hint!r}; expected bytes, 0 or more, or (shape, dtype), or None"
    )


def _checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        checked = tuple([operator.index(size) for size in shape])
    except TypeError:
        checked = (-1,)
    if any(size < 0 for size in checked):
        raise TensorShapeError(name, f"tensor {name!r} has shape {shape!r}; expected whole numbers, 0 or more")
    return checked


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
