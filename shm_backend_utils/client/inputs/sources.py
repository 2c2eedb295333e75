"""The inputs that users pass, and their descriptions of inputs to fill and of outputs that they want."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BYTES, LENGTH_SIZE, DType
from ...errors import CallerError, TensorError, TensorShapeError, TensorTypeError, shown
from ...model_spec import ModelSpec, TensorSpec, output_names
from ...protocol.call_layout import NO_DEVICES, AnyInput, CallInput
from ...tensors.strings import Strings
from ...tensors.values import parts_of

__all__ = [
    "SAME_VALUES",
    "Elsewhere",
    "InputDescription",
    "Outputs",
    "Source",
    "StringSource",
    "described_inputs",
    "source_of",
    "sources",
    "wanted_outputs",
]

OutputHint = int | str | tuple[tuple[int, ...], npt.DTypeLike] | tuple[tuple[int, ...], npt.DTypeLike, str] | None
"""Room to keep for an output: bytes, or a shape and a dtype, maybe with a device; None if the user does not know.

A device alone, for example ``"cuda:0"``, says where the output must be, not how large it is.
"""

Outputs = Iterable[str] | Mapping[str, OutputHint] | None
"""The outputs that the user wants, one or more, with or without hints of their size; None for all."""


class HasDlpack(Protocol):
    """A tensor of torch, CuPy, JAX and others."""

    def __dlpack_device__(self) -> Any:
        """Return the tensor's device, as DLPack defines it."""


class HasCudaArray(Protocol):
    """A tensor of Numba and others."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """The memory and its description."""


InputDescription = (
    tuple[Sequence[SupportsIndex], npt.DTypeLike]
    | tuple[Sequence[SupportsIndex], npt.DTypeLike, str]
    | HasDlpack
    | HasCudaArray
)
"""Shape and dtype of an input, and maybe a device, for example ``"cuda:0"``. Sizes may be NumPy integers, too.

Or a tensor on a GPU, of any array library: then that is the input's memory.
"""

_USUAL_STRING: Final = 60
_DEVICE: Final = re.compile(r"cuda(?::(\d{1,4}))?")


Elsewhere = Callable[[str, Any, Mapping[str, "Source"]], "Source | None"]
"""Takes an input's name and value, and the inputs found so far; returns a source if the value is not on the host."""


def _on_host(name: str, value: Any, found: Mapping[str, Source]) -> None:
    return None


def described_inputs(inputs: Mapping[str, InputDescription], elsewhere: Elsewhere = _on_host) -> dict[str, AnyInput]:
    """Return the inputs of a call as a user describes them; ``elsewhere`` turns tensors on GPUs into sources."""
    found: dict[str, AnyInput] = {}
    on_gpus: dict[str, Source] = {}
    if not isinstance(inputs, Mapping):
        raise _nameless(inputs, "(shape, dtype)")
    for name, description in inputs.items():
        source = elsewhere(name, description, on_gpus)
        if source is not None:
            found[name] = on_gpus[name] = source
        elif (
            isinstance(description, tuple | list) and len(description) in (2, 3) and hasattr(description[0], "__iter__")
        ):
            found[name] = _described(name, *description)
        else:
            raise TensorShapeError(
                name,
                f"input {name!r} is described by {shown(description)}; expected (shape, dtype), for example ((1, 3), "
                "'float32'), to be filled by inputs[...], or a tensor on a GPU",
            )
    return found


def _nameless(inputs: object, what: str) -> CallerError:
    return CallerError(
        f"inputs is of type {type(inputs).__name__}; expected a mapping of input names to {what}, for example "
        f"{{'INPUT0': {what}}}"
    )


class WantedOutputs(NamedTuple):
    byte_sizes: dict[str, int | None] | None  # the hints; None if the user wants all outputs, without hints
    devices: Mapping[str, int]  # of the outputs that the user wants on a GPU


def wanted_outputs(outputs: Outputs) -> WantedOutputs:
    if outputs is None:
        return WantedOutputs(None, NO_DEVICES)
    names = output_names(outputs)
    if not isinstance(outputs, Mapping):
        return WantedOutputs(dict.fromkeys(names), NO_DEVICES)
    byte_sizes: dict[str, int | None] = {}
    devices: dict[str, int] = {}
    for name, hint in outputs.items():
        byte_sizes[name], device = _hinted(name, hint)
        if device is not None:
            devices[name] = device
    return WantedOutputs(byte_sizes, devices)


def _device_of(name: str, device: object) -> int:
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise TensorError(name, f"the device of tensor {name!r} is {shown(device)}; expected for example 'cuda:0'")
    return int(found[1] or 0)


def _hinted(name: str, hint: object) -> tuple[int | None, int | None]:
    """Return the bytes and the device that a hint gives, each None if the hint lacks it."""
    if hint is None:
        return None, None
    if isinstance(hint, str):
        return None, _device_of(name, hint)
    if isinstance(hint, int | np.integer) and hint >= 0:
        return int(hint), None
    if isinstance(hint, tuple) and len(hint) in (2, 3) and hasattr(hint[0], "__iter__"):
        described = _described(name, *hint)
        return described.byte_size, described.device
    raise TensorError(
        name,
        f"the hint for output {name!r} is {shown(hint)}; expected bytes, 0 or more, or (shape, dtype), for "
        "example ((1, 3), 'float32'), or a device such as 'cuda:0', or (shape, dtype, device), or None. An output is "
        "always in the client's memory, so an array cannot be a hint",
    )


def _described(name: str, shape: Any, dtype: Any, *device: object) -> CallInput:
    """Return a tensor of a shape and a dtype; strings without a size in the dtype get room for an average length."""
    sizes, kind = _checked_shape(name, shape), dtypes.from_numpy(dtype, name)
    item_size = kind.itemsize
    if kind is BYTES:
        item_size = LENGTH_SIZE + (np.dtype(dtype).itemsize if np.dtype(dtype).kind in "SU" else _USUAL_STRING)
    return CallInput(kind, sizes, math.prod(sizes) * item_size, _device_of(name, *device) if device else None)


def _checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        checked = tuple([operator.index(size) for size in shape])
    except TypeError:
        checked = (-1,)
    if any(size < 0 for size in checked):
        raise TensorShapeError(name, f"tensor {name!r} has shape {shape!r}; expected whole numbers, 0 or more")
    return checked


_STRINGS: Final = frozenset("OSU")
SAME_VALUES: Final = "safe"
"""NumPy's rule for copies: a copy may change the byte order, or strings to objects. Dtypes were compared before."""
_OBJECT: Final = np.dtype(object)


@dataclass(slots=True, eq=False, repr=False)
class Source:
    """One input, in the memory where the user holds it."""

    dtype: DType
    shape: tuple[int, ...]  # as the model receives it
    byte_size: int
    parts: Sequence[npt.NDArray[Any]]  # in order along the first axis; in any memory order and byte order
    device: int | None = None  # the GPU's number in this process; None for the host
    is_lent: bool = False  # whether the model uses the user's own memory, on a GPU; never on the host

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Copy the tensor, once. ``target`` has the same shape and dtype."""
        if len(self.parts) == 1:
            np.copyto(target, self.parts[0], casting=SAME_VALUES)
            return
        begin = 0
        for part in self.parts:
            end = begin + len(part)
            np.copyto(target[begin:end], part, casting=SAME_VALUES)
            begin = end


class StringSource(Source):
    __slots__ = ("encoded",)

    def __init__(self, name: str, source: Source) -> None:
        pieces = [Strings.of(name, part).encoded for part in source.parts]
        self.encoded = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)  # the bytes as a slot holds them
        super().__init__(BYTES, source.shape, self.encoded.nbytes, source.parts)

    def write_to(self, target: npt.NDArray[Any]) -> None:
        if target.dtype == _OBJECT:
            super().write_to(target)
        else:
            target[: self.encoded.nbytes] = self.encoded


def source_of(name: str, array: npt.NDArray[Any]) -> Source:
    """Return an array on the host, of objects if it holds strings, as a source."""
    source = Source(dtypes.from_numpy(_native(array.dtype), name), array.shape, array.nbytes, (array,))
    return StringSource(name, source) if source.dtype is BYTES else source


def sources(spec: ModelSpec, inputs: Mapping[str, Any], elsewhere: Elsewhere = _on_host) -> dict[str, Source]:
    """Return each input of a call as a source: :func:`.parts_of` reads its value; a source stays as it is."""
    found: dict[str, Source] = {}
    try:
        named = inputs.items()
    except AttributeError:
        raise _nameless(inputs, "array") from None
    for name, value in named:
        is_source = isinstance(value, Source)
        found[name] = value if is_source else elsewhere(name, value, found) or _source(spec, spec.input(name), value)
    return found


def _source(spec: ModelSpec, tensor: TensorSpec, value: Any) -> Source:
    is_pair = isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], tuple | list)
    if is_pair and isinstance(value[1], str | type | np.dtype):
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
