"""Requests and responses, as the server hands them to a stub and takes them from it: all tensors are copied."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...dtypes import BF16, BY_NAME, BYTES
from .host import ResponseSink
from .pybind import TritonError
from .request import InferenceRequest, InferenceTrace, PreferredMemory
from .response import InferenceResponse, InferenceResponseSender
from .tensor import Tensor, deserialize_bytes_tensor, packed

__all__ = ["Delivery", "TensorContent", "deliver", "deliver_response", "sent_inputs", "sent_outputs"]

_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
"""Writes JSON as the server does."""


@dataclass(frozen=True, slots=True)
class TensorContent:
    """The parts of a tensor that a stub sends."""

    name: str
    datatype: str  # Triton's name, as "FP32"; "INVALID" for a type that the stub could not name
    shape: tuple[int, ...]  # as the tensor states it
    # The data in the pool, in memory of its own; strings as bytes objects. Its shape differs from the tensor's if a
    # fault of the stub has lost the bytes. None if it is on a GPU.
    array: npt.NDArray[Any] | None


class Delivery(NamedTuple):
    """A checked request, as an instance of its model gets it; it can be pickled."""

    inputs: Sequence[tuple[str, str, npt.NDArray[Any]]]  # names, Triton's data types, as "FP32", and contents
    requested_output_names: Iterable[str]
    parameters: Mapping[str, str | int | bool | float]
    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0  # 0 for none


def deliver(
    backend: ModuleType,
    delivery: Delivery,
    *,
    model_name: str,
    model_version: int,
    is_decoupled: bool,
    sink: ResponseSink,
    is_cancelled: Callable[[], bool],
) -> InferenceRequest:
    """Return a request as a stub gets it, its inputs copied as into the pool, and its parameters in another order."""
    kind: type[InferenceRequest] = backend.InferenceRequest
    made = kind.__new__(kind)
    made._request_id = delivery.request_id
    made._correlation_id = delivery.correlation_id
    made._inputs = [_loaded(backend, *tensor) for tensor in delivery.inputs]
    made._requested_output_names = set(delivery.requested_output_names)
    made._model_name = model_name
    made._model_version = model_version
    made._flags = delivery.flags
    made._timeout = delivery.timeout_us
    made._parameters = _json(delivery.parameters)
    made._trace = InferenceTrace()
    made._preferred_memory = PreferredMemory._unsaid()
    made._release_flags = 1
    made._is_cancelled = is_cancelled
    made._is_delivered = True
    made._sender = sender = InferenceResponseSender(made._requested_output_names)
    sender._serve(sink, is_cancelled, is_decoupled=is_decoupled)
    return made


def deliver_response(
    backend: ModuleType,
    outputs: Sequence[TensorContent],
    error: TritonError | None = None,
    parameters: Mapping[str, str | int | bool] | None = None,
) -> InferenceResponse:
    """Return the response of another model, as a stub gets it. Outputs are copied."""
    tensors = [
        _loaded(backend, output.name, output.datatype, output.array) for output in outputs if output.array is not None
    ]
    made = InferenceResponse(tensors, error)
    made._parameters = "" if error is not None else _json(parameters or {})
    return made


def sent_outputs(response: InferenceResponse) -> list[TensorContent]:
    """Return the tensors that leave a stub with a response; none if it has an error."""
    return [] if response.has_error() else [_content(tensor) for tensor in response.output_tensors()]


def sent_inputs(request: InferenceRequest) -> list[TensorContent]:
    """Return the tensors that leave a stub with a request of a model's."""
    return [_content(tensor) for tensor in request.inputs()]


def _loaded(backend: ModuleType, name: str, datatype: str, array: npt.NDArray[Any]) -> Tensor:
    row = BY_NAME[datatype]
    if row is BYTES:
        memory = packed(array).copy()
    elif row is BF16:
        memory = np.array(array, order="C").view(row.numpy)
    else:
        memory = np.array(array, row.numpy, order="C")
    kind: type[Tensor] = backend.Tensor
    return kind._loaded(name, row, array.shape, memory)


def _content(tensor: Tensor) -> TensorContent:
    shape = tuple(tensor._shape)
    if not tensor.is_cpu():
        return TensorContent(tensor.name(), tensor._datatype.name, shape, None)
    array = tensor._save()
    if tensor._datatype is BYTES:
        array = deserialize_bytes_tensor(array.tobytes())
        array = array.reshape(shape) if array.size == math.prod(shape) else array
    return TensorContent(tensor.name(), tensor._datatype.name, shape, array)


def _json(parameters: Mapping[str, Any]) -> str:
    return _ENCODER.encode(dict(reversed(list(parameters.items()))))
