"""The server's checks of a request before a model gets it, with its error texts; and warnings about outputs."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BY_NAME, BYTES, LENGTH_SIZE
from ...model_spec import ModelSpec, TensorSpec
from ...protocol.parameters import DESCRIPTOR_PARAMETER, SLOT_PARAMETER
from ..emulator import Delivery, TensorContent
from .model_folder import as_json, datatype_of
from .requests import Input, Outcome, Request, ServerError

__all__ = ["RequestChecks", "warn_of_outputs"]

_ANY_SIZE: Final = -1
_BATCH_NOTE: Final = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)

_FLAGS: Final = {"CONTROL_SEQUENCE_START": 1, "CONTROL_SEQUENCE_END": 2}

_ELSEWHERE: Final = frozenset({SLOT_PARAMETER, DESCRIPTOR_PARAMETER})


class RequestChecks:
    """Checks the requests of one model by its completed configuration."""

    def __init__(self, config: Any) -> None:
        self._name = config.name
        self._max_batch_size = int(config.max_batch_size)
        self._inputs = {tensor.name: tensor for tensor in config.input}
        self._dims = {name: tuple(tensor.dims) for name, tensor in self._inputs.items()}
        spec = ModelSpec.from_config({**json.loads(as_json(config)), "parameters": {}})
        self._reshaped, self._restored, self._controls = spec.inputs, spec.as_model_sees().outputs, spec.controls
        self._config = config
        self._datatypes = {name: datatype_of(tensor) for name, tensor in self._inputs.items()}
        self._required = [name for name, tensor in self._inputs.items() if not tensor.optional]
        self._outputs = tuple(tensor.name for tensor in config.output)
        self._known_outputs = frozenset(self._outputs)
        self._is_sequence = config.HasField("sequence_batching")

    def check(self, request: Request) -> tuple[Delivery, int]:
        """Return the request as its model gets it, and its batch size, 1 without batches; or raise ServerError."""
        who = f"[request id: {request.request_id or '<id_unknown>'}] "
        wanted = tuple(request.outputs) if request.outputs else self._outputs
        for place, name in enumerate(wanted):
            if name in wanted[:place]:
                raise ServerError(f"{who}output '{name}' already exists in request")
            if name not in self._known_outputs:
                raise ServerError(f"unexpected inference output '{name}' for model '{self._name}'")
        inputs = request.inputs
        if len(inputs) > len(self._inputs) or len(inputs) < len(self._required):
            raise ServerError(who + self._wrong_number(inputs))
        batch_size = self._batch_size(inputs, who)
        delivered = [self._deliver(tensor, batch_size, who) for tensor in inputs.values()]
        missing = [name for name in self._required if name not in inputs]
        if missing:  # the number is right, but the names are not
            raise ServerError(who + self._wrong_number(inputs))
        if self._is_sequence and not request.sequence_id:
            raise ServerError(
                f"inference request to model '{self._name}' must specify a non-zero or non-empty correlation ID"
            )
        if self._max_batch_size > 0 and not inputs:
            raise ServerError(f"{who}out of bounds index 0: request has 0 inputs")
        delivery = Delivery(
            delivered + control_inputs(self._config, self._controls, request),
            wanted,
            dict(request.parameters),
            request.request_id,
            request.sequence_id,
            request.flags,
            request.timeout_us,
        )
        return delivery, batch_size if self._max_batch_size > 0 else 1

    def restored(self, output: TensorContent) -> TensorContent:
        """Return an output as the server sends it: one with a ``reshape`` has its declared ``dims`` again."""
        known = self._restored.get(output.name)
        if known is None or known.reshape is None or output.array is None or len(output.shape) != len(known.shape):
            return output
        shape = known.reshaped(output.shape)
        return replace(output, shape=shape, array=output.array.reshape(shape))

    def _batch_size(self, inputs: Any, who: str) -> int:
        found = 0
        if self._max_batch_size == 0:
            for name in inputs:
                self._known(name)
            return 0
        for name, tensor in inputs.items():
            self._known(name)
            if not tensor.shape:
                raise ServerError(
                    f"{who}input '{name}' has no shape but model requires batch dimension for '{self._name}'"
                )
            if found == 0:
                found = tensor.shape[0]
            elif tensor.shape[0] != found:
                raise ServerError(f"{who}input '{name}' batch size does not match other inputs for '{self._name}'")
        if found > self._max_batch_size:
            raise ServerError(f"{who}inference request batch-size must be <= {self._max_batch_size} for '{self._name}'")
        return found

    def _known(self, name: str) -> None:
        if name not in self._inputs:
            raise ServerError(f"unexpected inference input '{name}' for model '{self._name}'")

    def _deliver(self, tensor: Input, batch_size: int, who: str) -> tuple[str, str, npt.NDArray[Any]]:
        name, datatype, shape, content = tensor
        expected = self._datatypes[name]
        if datatype != expected:
            found = datatype if datatype in BY_NAME else "<invalid>"
            raise ServerError(
                f"{who}inference input '{name}' data-type is '{found}', but model '{self._name}' expects '{expected}'"
            )
        dims = self._dims[name]
        rows = shape[1:] if self._max_batch_size > 0 else shape
        if rows != dims or _ANY_SIZE in rows:
            self._check_shape(tensor, rows, dims, who)
        whole = (batch_size, *rows) if batch_size else rows  # so the server counts in an empty batch
        delivered = (batch_size, *rows) if self._max_batch_size > 0 else rows
        if name in self._reshaped:
            delivered = self._reshaped[name].reshaped(delivered)
        is_array = isinstance(content, np.ndarray)
        if datatype == BYTES.name:
            strings = content if is_array else self._strings(name, content, whole, who)
            return name, datatype, strings.reshape(delivered)
        row = BY_NAME[datatype]
        byte_size, got = math.prod(whole) * row.itemsize, content.nbytes if is_array else len(content)
        if got != byte_size:
            raise ServerError(
                f"{who}input byte size mismatch for input '{name}' for model '{self._name}'. Expected {byte_size}, got "
                f"{got}"
            )
        array = content if is_array else np.frombuffer(content, row.numpy)
        return name, datatype, array.reshape(delivered)

    def _check_shape(self, tensor: Input, rows: tuple[int, ...], dims: tuple[int, ...], who: str) -> None:
        fits = len(rows) == len(dims)
        for size, dim in zip(rows, dims, strict=False) if fits else ():
            if size == _ANY_SIZE:
                raise ServerError(
                    f"{who}All input dimensions should be specified for input '{tensor.name}' for model "
                    f"'{self._name}', got {_listed(tensor.shape)}"
                )
            if dim not in (_ANY_SIZE, size):
                fits = False
                break
        if not fits:
            is_batched = self._max_batch_size > 0
            expected = (_ANY_SIZE, *dims) if is_batched else dims
            raise ServerError(
                f"{who}unexpected shape for input '{tensor.name}' for model '{self._name}'. Expected "
                f"{_listed(expected)}, got {_listed(tensor.shape)}. {_BATCH_NOTE if is_batched else ''}"
            )

    def _strings(self, name: str, content: Any, shape: tuple[int, ...], who: str) -> npt.NDArray[Any]:
        count = math.prod(shape)
        found: list[bytes] = []
        offset = 0
        whose = f"for inference input '{name}' for model '{self._name}'"
        while offset < len(content):
            left = len(content) - offset
            if left < LENGTH_SIZE:
                raise ServerError(
                    f"{who}incomplete string length indicator {whose}, expecting {LENGTH_SIZE} bytes but only {left} "
                    "bytes available. Please make sure the string length indicator is in one buffer."
                )
            if len(found) == count:
                raise ServerError(f"{who}unexpected number of string elements {count + 1} {whose}, expecting {count}")
            (length,) = struct.unpack_from("<I", content, offset)
            offset += LENGTH_SIZE
            if length > len(content) - offset:
                raise ServerError(
                    f"incomplete string data for inference input '{name}', expecting string of length {length} but "
                    f"only {len(content) - offset} bytes available"
                )
            found.append(bytes(content[offset : offset + length]))
            offset += length
        if len(found) != count:
            raise ServerError(f"{who}expected {count} string elements {whose}, got {len(found)}")
        array = np.empty(count, object)
        array[:] = found
        return array

    def _wrong_number(self, inputs: Any) -> str:
        got = "[" + ",".join(f"'{name}'" for name in inputs) + "]"
        lacking = [name for name in self._required if name not in inputs]
        missing = "[" + ",".join(f"'{name}'" for name in lacking) + "]" if lacking else "]"  # as the server writes it
        least, most = len(self._required), len(self._inputs)
        expected = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
        return (
            f"expected {expected} but got {len(inputs)} inputs for model '{self._name}'. Got input(s) {got}, but "
            f"missing required input(s) {missing}. Please provide all required input(s)."
        )


def _listed(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def control_inputs(
    config: Any, controls: Mapping[str, TensorSpec], request: Request
) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return name, data type and array of each control input of a request; ``config`` is completed."""
    found = []
    for tensor in config.sequence_batching.control_input:
        control, spec = tensor.control[0], controls[tensor.name]
        kind, dtype = control.Kind.Name(control.kind), spec.dtype
        assert dtype is not None  # the server loads no model without it
        is_so = kind not in _FLAGS or bool(request.flags & _FLAGS[kind])  # READY is true for each request
        values = control.int32_false_true or control.fp32_false_true or control.bool_false_true
        number = request.sequence_id
        value: Any = values[is_so] if values else str(number).encode() if dtype is BYTES else number
        found.append((spec.name, dtype.name, np.full((1,) * len(spec.shape), value, dtype.numpy)))
    return found


def warn_of_outputs(config: Any, delivery: Delivery, outcome: Outcome, *, stacklevel: int) -> None:
    """Warn if a response without error lacks outputs, or has outputs that differ from the model's configuration."""
    if outcome.error is not None:
        return
    given = {tensor.name: tensor for tensor in outcome.outputs}
    # A response need not have them all if they go to shared memory, or if the model is decoupled.
    is_complete = config.model_transaction_policy.decoupled or not _ELSEWHERE.isdisjoint(delivery.parameters)
    for name in () if is_complete else delivery.requested_output_names:
        if name not in given:
            warnings.warn(
                f"model {config.name!r} answered without output {name!r}, and a server does not report that: return a "
                "pb_utils.Tensor of that name, spelled as in config.pbtxt",
                stacklevel=stacklevel,
            )
    for declared in config.output:
        if declared.name not in given:
            continue
        tensor = given[declared.name]
        datatype, dims = datatype_of(declared), _dims(declared, config.max_batch_size)
        fits = len(dims) == len(tensor.shape) and all(
            dim in (_ANY_SIZE, size) for dim, size in zip(dims, tensor.shape, strict=True)
        )
        if tensor.datatype != datatype or not (fits or declared.HasField("reshape")):
            warnings.warn(
                f"output {tensor.name!r} of model {config.name!r} is {tensor.datatype} {list(tensor.shape)}, but "
                f"config.pbtxt declares {datatype} {list(dims)}, and a server sends it unchecked: correct one of them",
                stacklevel=stacklevel,
            )


def _dims(declared: Any, max_batch_size: int) -> tuple[int, ...]:
    return (_ANY_SIZE, *declared.dims) if max_batch_size > 0 else tuple(declared.dims)
