"""A call laid out: which tensors it has, what must be true of them, and where each goes in a slot. No I/O."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES, LENGTH_SIZE, DType
from ..errors import BatchSizeError, MissingTensorError, TensorError, TensorShapeError, TensorTypeError
from ..model_spec import ModelSpec
from ..protocol.descriptor import InputSpan, OutputSpan

__all__ = [
    "CallPlan",
    "InputDescription",
    "OutputHint",
    "Signature",
    "aligned",
    "device_of",
    "many_of",
    "output_devices",
    "plan",
    "rows_of",
    "signature",
    "wanted_outputs",
]

OutputHint = int | str | tuple[tuple[int, ...], npt.DTypeLike] | tuple[tuple[int, ...], npt.DTypeLike, str] | None
"""Room to keep for an output: bytes, or a shape and a dtype, maybe with a device; None if the user does not know.

A device alone, for example ``"cuda:0"``, says where the output shall be, and not how large it is.
"""

InputDescription = tuple[Sequence[int], npt.DTypeLike] | tuple[Sequence[int], npt.DTypeLike, str]
"""Shape and dtype of an input, and maybe a device, for example ``"cuda:0"``."""

_ALIGNMENT: Final = 256
"""Every tensor begins at a multiple of this in its region, which is what ``dlpack.h`` asks of producers."""
_STRINGS: Final = "OSU"
_USUAL_STRING: Final = 60
_DEVICE: Final = re.compile(r"cuda(?::(\d{1,4}))?")


class Signature(NamedTuple):
    """A call without its data. Hashable: calls with one signature have one plan.

    Attributes
    ----------
    inputs : tuple of (name, shape, dtype)
    outputs : tuple of (name, bytes or None), or None
        What is wanted, with the bytes hinted at; None for all.
    input_devices, output_devices : tuple of (name, device)
        Which of them are on a GPU, by this process' numbers.
    string_sizes : tuple of (name, bytes)
        Room for inputs of strings.
    """

    inputs: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    outputs: tuple[tuple[str, int | None], ...] | None
    input_devices: tuple[tuple[str, int], ...] = ()
    output_devices: tuple[tuple[str, int], ...] = ()
    string_sizes: tuple[tuple[str, int], ...] = ()

    def on_host(self) -> Signature:
        """Return the same call with all tensors on the host."""
        return Signature(self.inputs, self.outputs, string_sizes=self.string_sizes)


@dataclass(frozen=True, eq=False)
class CallPlan:
    """Where a call's tensors go, as offsets from the beginning of a slot's data, or of its memory on a GPU.

    Region 0 of the spans is on the host; region 1 is on the first of the plan's devices, and so on.

    Attributes
    ----------
    inputs : mapping of str to InputSpan
        Those that the call has.
    outputs : mapping of str to OutputSpan
        Room for what is wanted; those that cannot be in a slot are missing.
    certain : frozenset of str
        Outputs whose room is certain to do: it follows from the configuration, or the user vouched for it.
    requested : tuple of str or None
        As the user said; None for all.
    byte_size : int
        On the host.
    devices, device_byte_sizes : tuple of int
        The GPUs that tensors are on, and how much memory they need there.
    """

    spec: ModelSpec
    signature: Signature
    batch_size: int | None
    inputs: Mapping[str, InputSpan]
    outputs: Mapping[str, OutputSpan]
    certain: frozenset[str]
    requested: tuple[str, ...] | None
    byte_size: int
    devices: tuple[int, ...] = ()
    device_byte_sizes: tuple[int, ...] = ()

    @cached_property
    def input_byte_size(self) -> int:
        """Bytes of all inputs in the slot."""
        return sum(span.byte_size for span in self.inputs.values())

    @cached_property
    def strings(self) -> frozenset[str]:
        """The inputs that are strings. Only on the direct path do they lie in the slot."""
        return frozenset(name for name, span in self.inputs.items() if span.dtype is BYTES)

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
    inputs: Mapping[str, InputDescription],
    outputs: Sequence[str] | Mapping[str, OutputHint] | None,
) -> Signature:
    """Return the signature of a call as a user describes it.

    Raises
    ------
    TensorError
        A shape has a size that is no number of 0 or more; or as :func:`wanted_outputs`.
    """
    described, devices, string_sizes = [], [], []
    for name, (given_shape, given_dtype, *device) in inputs.items():
        shape, dtype = _checked_shape(name, given_shape), np.dtype(given_dtype)
        if dtype.kind in _STRINGS:
            string_sizes.append((name, _room_for_strings(shape, dtype)))
            dtype = BYTES.numpy
        described.append((name, shape, dtype))
        devices += [(name, device_of(name, each)) for each in device]
    wanted, wanted_on = wanted_outputs(outputs), output_devices(outputs)
    return Signature(tuple(described), wanted, tuple(devices), wanted_on, tuple(string_sizes))


def output_devices(outputs: Sequence[str] | Mapping[str, OutputHint] | None) -> tuple[tuple[str, int], ...]:
    """Return which outputs are wanted on a GPU, as a signature has it; raises TensorError as :func:`wanted_outputs`."""
    if not isinstance(outputs, Mapping):
        return ()
    devices = [(name, _device_hint(name, hint)) for name, hint in outputs.items()]
    return tuple([(name, device) for name, device in devices if device is not None])


def device_of(name: str, device: object) -> int:
    """Return the number of a device that a user names as ``"cuda"`` or ``"cuda:N"``; raises TensorError."""
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise TensorError(name, f"the device of tensor {name!r} is {device!r}; expected for example 'cuda:0'")
    return int(found[1] or 0)


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
    devices = tuple(sorted({device for _, device in (*call.input_devices, *call.output_devices)}))
    region_of_device = {device: index for index, device in enumerate(devices, 1)}
    region_of_input = {name: region_of_device[device] for name, device in call.input_devices}
    region_of_output = {name: region_of_device[device] for name, device in call.output_devices}
    cursors = [0] * (1 + len(devices))
    string_sizes = dict(call.string_sizes)
    spans = {}
    for name, shape, numpy_dtype in call.inputs:
        dtype = dtypes.from_numpy(numpy_dtype, name)
        spec.input(name).check(dtype, shape)
        _check_is_on_host(name, dtype, region_of_input)
        nbytes = string_sizes[name] if dtype is BYTES else math.prod(shape) * dtype.itemsize
        region = region_of_input.get(name, 0)
        spans[name] = InputSpan(region, cursors[region], nbytes, dtype, shape)
        cursors[region] = aligned(cursors[region] + nbytes)
    _check_none_is_missing(spec, {name for name, _, _ in call.inputs})
    batch_size = _batch_size(spec, call, most_rows)
    hints = dict(call.outputs or ())
    outputs, certain = {}, set()
    for name in spec.outputs if call.outputs is None else hints:
        tensor = spec.output(name)
        if tensor.dtype is None:
            continue
        _check_is_on_host(name, tensor.dtype, region_of_output)
        known, hint = tensor.nbytes(batch_size), hints.get(name)
        if known is not None or hint is not None:
            certain.add(name)
        rows = 1 if batch_size is None else batch_size
        room = hint if hint is not None else learned.get(name, 0) * rows if known is None else known
        region = region_of_output.get(name, 0)
        outputs[name] = OutputSpan(region, cursors[region], room)
        cursors[region] = aligned(cursors[region] + room)
    requested = None if call.outputs is None else tuple(hints)
    return CallPlan(
        spec,
        call,
        batch_size,
        spans,
        outputs,
        frozenset(certain),
        requested,
        cursors[0],
        devices,
        tuple([max(size, _ALIGNMENT) for size in cursors[1:]]),  # CUDA allocates nothing of no size
    )


def many_of(call: Signature, count: int) -> Signature:
    """Return so many calls, one after another, as one."""
    inputs = tuple([(name, (shape[0] * count, *shape[1:]), dtype) for name, shape, dtype in call.inputs])
    if call.outputs is None:
        return Signature(inputs, None)
    return Signature(inputs, tuple([(name, None if size is None else size * count) for name, size in call.outputs]))


def rows_of(whole: CallPlan, begin: int, end: int, call: Signature) -> CallPlan:
    """Return the plan of some rows of a call, in the same place; ``call`` is what they are a call of.

    Where rows of an output have no certain size, each row gets the same share of the room.
    """
    assert whole.batch_size is not None
    rows, count = whole.batch_size, end - begin
    inputs, outputs = {}, {}
    for name, span in whole.inputs.items():
        row_size = span.byte_size // rows
        offset, byte_size = span.offset + begin * row_size, count * row_size
        inputs[name] = InputSpan(span.region, offset, byte_size, span.dtype, (count, *span.shape[1:]))
    for name, room in whole.outputs.items():
        row_size = room.byte_size // rows
        outputs[name] = OutputSpan(room.region, room.offset + begin * row_size, count * row_size)
    return replace(whole, signature=call, batch_size=count, inputs=inputs, outputs=outputs)


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


def _check_is_on_host(name: str, dtype: DType, regions_on_devices: Mapping[str, int]) -> None:
    if dtype is BYTES and name in regions_on_devices:
        raise TensorTypeError(name, f"tensor {name!r} holds strings, which no GPU has; expected it on the host")


def _check_none_is_missing(spec: ModelSpec, given: set[str]) -> None:
    for name, tensor in spec.inputs.items():
        if not tensor.optional and name not in given:
            raise MissingTensorError(name, f"model {spec.name!r} needs input {name!r}, which the call does not have")


def _room_for_strings(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes that strings of a dtype take at most; of objects, whose size it does not tell, on average."""
    longest = {"S": dtype.itemsize, "U": dtype.itemsize, "O": _USUAL_STRING}[dtype.kind]
    return math.prod(shape) * (LENGTH_SIZE + longest)


def _hinted(name: str, hint: object) -> int | None:
    if hint is None or isinstance(hint, str):
        return None
    if isinstance(hint, int | np.integer) and hint >= 0:
        return int(hint)
    if isinstance(hint, tuple) and len(hint) in (2, 3):
        shape, dtype = hint[:2]
        checked, row = _checked_shape(name, shape), dtypes.from_numpy(dtype, name)
        return _room_for_strings(checked, np.dtype(dtype)) if row is BYTES else math.prod(checked) * row.itemsize
    raise TensorError(
        name,
        f"the hint for output {name!r} is {hint!r}; expected bytes, 0 or more, or (shape, dtype), or a device such as "
        "'cuda:0', or (shape, dtype, device), or None",
    )


def _device_hint(name: str, hint: object) -> int | None:
    if isinstance(hint, tuple) and len(hint) == 3:
        return device_of(name, hint[2])
    return device_of(name, hint) if isinstance(hint, str) else None


def _checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        checked = tuple([operator.index(size) for size in shape])
    except TypeError:
        checked = (-1,)
    if any(size < 0 for size in checked):
        raise TensorShapeError(name, f"tensor {name!r} has shape {shape!r}; expected whole numbers, 0 or more")
    return checked


def aligned(offset: int) -> int:
    """Return where the next tensor may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
