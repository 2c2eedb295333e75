"""A model's configuration, read once and checked, with its inputs and outputs. Both halves use it. No I/O."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from . import dtypes
from .dtypes import DType
from .errors import (
    CallerError,
    ModelError,
    PeerError,
    TensorError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
    name_list,
)

__all__ = [
    "BATCH_CARRIER",
    "CARRIER",
    "CARRIER_LINE",
    "PATHS",
    "PATHS_LINE",
    "PATHS_PARAMETER",
    "UIDS_PARAMETER",
    "ModelSpec",
    "TensorSpec",
    "is_of_python_backend",
    "output_names",
]

BATCH_CARRIER: Final = "SHM"
CARRIER: Final = {"name": BATCH_CARRIER, "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
CARRIER_LINE: Final = f'{{ name: "{BATCH_CARRIER}" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }}'
"""The optional input whose shape ``[B, 0]`` tells Triton's batcher the batch size without bytes; in JSON and as a line.

Its presence alone declares all paths, because ``auto_complete_config`` cannot set a parameter.
"""

PATHS_PARAMETER: Final = "SHM_PATHS"
PATHS_LINE: Final = f'parameters {{ key: "{PATHS_PARAMETER}" value: {{ string_value: "direct,triton-shm,inline" }} }}'
"""The parameter in ``config.pbtxt`` that declares the paths of a model, and the line that declares all of them."""

UIDS_PARAMETER: Final = "SHM_ALLOWED_UIDS"
"""The parameter in ``config.pbtxt`` that lists the users whose regions the model opens."""

PATHS: Final = frozenset({"direct", "triton-shm", "inline"})
"""The paths that the parameter may name."""

_MOST_ROWS: Final = 2**31 - 1
_LARGEST: Final = 2**63 - 1
_CORRELATION_ID: Final = "CONTROL_SEQUENCE_CORRID"
_BY_VALUES: Final = {"int32_false_true": "TYPE_INT32", "fp32_false_true": "TYPE_FP32", "bool_false_true": "TYPE_BOOL"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    config_dtype: str  # as in the configuration, for example "TYPE_FP32"
    dtype: DType | None  # None if the configuration names no type
    shape: tuple[int, ...]  # as a request has it: with the batch dimension, where there is one; -1 is any size
    optional: bool
    is_batched: bool = False  # whether the first dimension is the batch
    # The shape after the configuration's reshape, which model.py sees; None without one. In as_model_sees(), the two
    # shapes are swapped.
    reshape: tuple[int, ...] | None = None
    # The dimensions from the first one of fixed size on; a later one of any size is -1.
    fixed_end: tuple[int, ...] = field(init=False, repr=False, compare=False)
    # The bytes of a row, or of the whole tensor without batches; None if the configuration does not fix them.
    row_byte_size: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = self.shape[1:] if self.is_batched else self.shape
        is_known = self.dtype is not None and self.dtype is not dtypes.BYTES and -1 not in sizes
        size = math.prod(sizes) * self.dtype.itemsize if is_known and self.dtype is not None else None
        count = next((index for index, size in enumerate(self.shape) if size != -1), len(self.shape))
        object.__setattr__(self, "fixed_end", self.shape[count:])
        object.__setattr__(self, "row_byte_size", size)

    def __str__(self) -> str:
        optional = "optional" if self.optional else "not optional"
        return f"{self.name} ({self.config_dtype} {list(self.shape[self.is_batched :])}, {optional})"

    def check(self, dtype: DType, shape: tuple[int, ...]) -> None:
        """Raise :class:`TensorError` unless a tensor of this dtype and shape fits the configuration."""
        if dtype is not self.dtype:
            raise TensorTypeError(
                self.name,
                f"tensor {self.name!r} is {dtype.name}, but the model's configuration says {self.config_dtype}"
                f"{self._remedy_of_dtype(dtype)}",
            )
        if shape != self.shape or -1 in shape:
            self.check_shape(shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise :class:`TensorShapeError` unless a tensor of this shape fits the configuration."""
        if len(shape) == len(self.shape):
            for size, want in zip(shape, self.shape, strict=True):
                if size < 0 or want not in (size, -1):
                    break
            else:
                return
        found = f"tensor {self.name!r} has shape {list(shape)}"
        if any(size < 0 for size in shape):
            raise TensorShapeError(self.name, f"{found}; expected sizes of 0 or more")
        remedy = ""
        if self.is_batched and len(shape) == len(self.shape) - 1:
            remedy = f"; the first dimension is the batch: one row has shape {[1, *shape]}, as array[np.newaxis] has"
        elif not shape:
            takes_one = all(size in (-1, 1) for size in self.shape)
            remedy = f"; give it its dimensions, by array.reshape(...){', or pass a plain number' if takes_one else ''}"
        legend = " (-1 is any size)" if -1 in self.shape else ""
        raise TensorShapeError(
            self.name, f"{found}, but the model's configuration says {list(self.shape)}{legend}{remedy}"
        )

    def reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape to which Triton reshapes a fitting shape; dimensions of any size keep their order."""
        if self.reshape is None:
            return shape
        sizes = iter([size for size, want in zip(shape, self.shape, strict=True) if want == -1])
        return tuple(next(sizes) if want == -1 else want for want in self.reshape)

    def _remedy_of_dtype(self, dtype: DType) -> str:
        if self.dtype is dtypes.BYTES:
            return "; pass strings: a list, or an array of objects, of str or bytes"
        if self.dtype is None or self.dtype.numpy.kind == "V":
            return ""
        taken = "objects are taken for strings; " if dtype is dtypes.BYTES else ""
        return f"; {taken}convert it by .astype('{self.dtype.numpy.name}')"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The parts of a model's configuration that shared memory depends on."""

    name: str
    max_batch_size: int  # 0 if requests have no batch dimension
    inputs: Mapping[str, TensorSpec]  # without the batch carrier, as are the outputs
    outputs: Mapping[str, TensorSpec]
    paths: frozenset[str] | None  # declared by SHM_PATHS, or else by the batch carrier; None if by neither
    has_batch_carrier: bool  # an input carries the batch size of requests without tensors
    has_batcher: bool  # the server may serve several requests as one batch
    is_decoupled: bool  # the model answers a request with any number of responses, in a stream
    is_ensemble: bool  # the model consists of other models, which get its tensors from Triton
    allowed_uids: str | None  # the text of SHM_ALLOWED_UIDS, unchecked; None where it is not set
    sequences: str = ""  # Triton's strategy, "direct" or "oldest"; empty for a model without sequences
    # The control inputs, which Triton adds to each request of a sequence and no client sends.
    controls: Mapping[str, TensorSpec] = field(default_factory=dict)
    # Whether the control for a sequence's id takes a string or an integer; None without such a control.
    names_sequences: bool | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a configuration in JSON, whose integers may be strings; ModelError if ``SHM_PATHS`` is wrong."""
        max_batch_size = int(config.get("max_batch_size", 0))
        batched = max_batch_size > 0
        inputs = {tensor["name"]: _tensor_spec(tensor, batched) for tensor in config.get("input", ())}
        declared = _declared_paths(config)
        is_called_for = batched or declared is None  # without batches, the carrier may be there only to declare paths
        has_carrier = is_called_for and inputs.get(BATCH_CARRIER) == _tensor_spec(CARRIER, batched)
        if has_carrier:
            inputs.pop(BATCH_CARRIER)
        batching = config.get("sequence_batching") or {}
        controls = dict(_control_types(batching))
        return cls(
            name=config["name"],
            max_batch_size=max_batch_size,
            inputs=inputs,
            outputs={tensor["name"]: _tensor_spec(tensor, batched) for tensor in config.get("output", ())},
            paths=PATHS if declared is None and has_carrier else declared,
            has_batch_carrier=has_carrier,
            has_batcher=batched and ("dynamic_batching" in config or "sequence_batching" in config),
            is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            is_ensemble=config.get("platform") == "ensemble",
            allowed_uids=config.get("parameters", {}).get(UIDS_PARAMETER, {}).get("string_value"),
            sequences="" if "sequence_batching" not in config else "oldest" if "oldest" in batching else "direct",
            controls={
                name: _tensor_spec({"name": name, "data_type": dtype, "dims": (1,), "optional": True}, batched)
                for name, (_, dtype) in controls.items()
            },
            names_sequences=next(
                (dtype == "TYPE_STRING" for kind, dtype in controls.values() if kind == _CORRELATION_ID), None
            ),
        )

    @classmethod
    def of_server(cls, model: str, config: Any) -> ModelSpec:
        """Read a server's description of a model; raise PeerError unless it is a configuration of that model."""
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            spec = cls.from_config(config)
            tensors = (*spec.inputs.values(), *spec.outputs.values(), *spec.controls.values())
            if spec.name == model and 0 <= spec.max_batch_size <= _MOST_ROWS and all(map(_is_sound, tensors)):
                return spec
        raise PeerError(f"the server's description of model {model!r} is not a configuration of it; is this Triton?")

    def as_model_sees(self) -> ModelSpec:
        """Return the spec with the shapes that ``model.py`` sees; the same object if no tensor has a ``reshape``."""
        if all(tensor.reshape is None for each in (self.inputs, self.outputs) for tensor in each.values()):
            return self
        inputs, outputs = (
            {n: t if t.reshape is None else replace(t, shape=t.reshape, reshape=t.shape) for n, t in each.items()}
            for each in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def obstacle_to_direct(self) -> str | None:
        """Return why the configuration rules out the direct path, with the remedy; None if it does not."""
        return self.obstacle_in_paths() or self.obstacle_in_inputs()

    def obstacle_in_paths(self) -> str | None:
        """Return the obstacle if the model does not declare the direct path, or cannot have it."""
        if self.is_ensemble:
            return (
                f"model {self.name!r} is an ensemble: Triton passes its tensors to the steps itself, whatever its "
                f"{PATHS_PARAMETER} says; for the direct path, call a step by its own name, or a model that calls "
                "the steps by call.forward"
            )
        if self.paths is not None and "direct" in self.paths:
            return None
        remedy = f"add to its config.pbtxt: {PATHS_LINE}" if self.paths is None else f"add direct to {PATHS_PARAMETER}"
        return f"model {self.name!r} does not declare the direct path; if its model.py uses ShmSession, {remedy}"

    def obstacle_in_inputs(self) -> str | None:
        """Return the obstacle if Triton would not pass on a request without tensors."""
        required = [name for name, tensor in self.inputs.items() if not tensor.optional]
        if required:
            return (
                f"input {required[0]!r} of model {self.name!r} is not optional, so Triton refuses a request that "
                "carries no bytes for it; add `optional: true` to it in config.pbtxt"
            )
        if self.max_batch_size > 0 and not self.has_batch_carrier:
            own = self.inputs.get(BATCH_CARRIER)
            found = "no input to carry the batch size; add input" if own is None else f"input {own}; expected"
            has = f"model {self.name!r} has max_batch_size {self.max_batch_size}"
            return f"{has} but {found} {CARRIER_LINE} in config.pbtxt"
        return None

    def input(self, name: str) -> TensorSpec:
        """Return the input of this name or raise :class:`TensorNameError`."""
        return _named(self.inputs, name, f"model {self.name!r} has no input")

    def output(self, name: str) -> TensorSpec:
        """Return the output of this name or raise :class:`TensorNameError`."""
        return _named(self.outputs, name, f"model {self.name!r} has no output")


def output_names(outputs: Any) -> list[str]:
    """Return the names of the outputs that a call wants, each once; CallerError for an empty list or other values."""
    if isinstance(outputs, str):
        raise TensorError(outputs, f"outputs is the string {outputs!r}; expected a list of names, or a mapping")
    try:
        names = list(dict.fromkeys(outputs))
    except TypeError:
        raise CallerError(f"outputs is {outputs!r}; expected a list of names, or a mapping") from None
    for name in names:
        if not isinstance(name, str):
            raise CallerError(
                f"outputs has an element of type {type(name).__name__}; expected names of outputs, as str"
            )
    if not names:
        raise CallerError("outputs is empty; expected the names of the outputs that you want; leave it out for all")
    return names


def _named(tensors: Mapping[str, TensorSpec], name: str, missing: str) -> TensorSpec:
    try:
        return tensors[name]
    except KeyError:
        why = "" if tensors else "; check that its folder has a config.pbtxt that lists them"
        raise TensorNameError(name, f"{missing} {name!r}; it has {name_list(name, tensors)}{why}") from None


def _is_sound(tensor: TensorSpec) -> bool:
    """Return whether a tensor has a name and possible sizes; raise ValueError or AttributeError for a bad name."""
    sizes = (*tensor.shape, *(tensor.reshape or ()))
    return bool(tensor.name.encode()) and all(-1 <= size <= _LARGEST for size in sizes)


def _tensor_spec(tensor: Mapping[str, Any], batched: bool) -> TensorSpec:
    rows = (-1,) if batched else ()
    dims = tuple(int(dim) for dim in tensor.get("dims", ()))
    reshape = tensor.get("reshape")
    config_dtype = tensor.get("data_type", "TYPE_INVALID")
    return TensorSpec(
        name=tensor["name"],
        config_dtype=config_dtype,
        dtype=dtypes.BY_CONFIG.get(config_dtype),
        shape=(*rows, *dims),
        optional=bool(tensor.get("optional", False)),
        is_batched=batched,
        reshape=None if reshape is None else (*rows, *(int(dim) for dim in reshape.get("shape", ()))),
    )


def _control_types(batching: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield names of control inputs, each with its kind and its data type in the configuration."""
    for tensor in batching.get("control_input", ()):
        for control in tensor.get("control", ()):
            declared = control.get("data_type", "TYPE_INVALID")  # only the control for an id has this field
            dtype = next((dtype for values, dtype in _BY_VALUES.items() if control.get(values)), declared)
            yield tensor["name"], (str(control.get("kind", "")), dtype)


def _declared_paths(config: Mapping[str, Any]) -> frozenset[str] | None:
    declared = config.get("parameters", {}).get(PATHS_PARAMETER)
    if declared is None:
        return None
    words = [word.strip() for word in declared.get("string_value", "").split(",") if word.strip()]
    unknown = next((word for word in words if word not in PATHS), None)
    if unknown is not None or not words:
        raise ModelError(
            f"parameter {PATHS_PARAMETER} of model {config['name']!r} {f'has {unknown!r}' if words else 'is empty'}; "
            f"expected, separated by commas, some of {name_list(unknown, sorted(PATHS))}"
        )
    return frozenset(words)


def is_of_python_backend(config: Mapping[str, Any]) -> bool:
    """Return whether a model is in Python, or may be because its configuration names neither backend nor platform."""
    return bool(config.get("backend", "") == "python" or not (config.get("backend") or config.get("platform")))
