"""A request as a message of the KServe v2 protocol, which is what Triton speaks over gRPC (``grpc_service.proto``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import grpc
import numpy.typing as npt
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from ..errors import CallerError
from .transport import InputTensor, OutputTensor, Place, Request

__all__ = ["GrpcMessage", "encode"]

_COMPRESSION: Final = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
_FIELDS: Final = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))


class GrpcMessage(NamedTuple):
    """What one call of the service takes. A request may be sent again, with other parameters."""

    request: Any
    metadata: Sequence[tuple[str, str]] | None = None
    compression: Any = None


def encode(request: Request) -> GrpcMessage:
    """Return a request as a message.

    Raises
    ------
    CallerError
        A parameter has a value that cannot be sent.
    """
    options = request.options
    message = service_pb2.ModelInferRequest(
        model_name=request.model, model_version=options.get("model_version", ""), id=options.get("request_id", "")
    )
    for tensor in request.inputs:
        _add_input(message, tensor)
    for output in request.outputs or ():
        _add_output(message, output)
    _add_options(message, options)
    for name, value in {**options.get("parameters", {}), **request.parameters}.items():
        _set(message.parameters[name], name, value)
    headers = options.get("headers")
    metadata = None if headers is None else [(name.lower(), value) for name, value in headers.items()]
    return GrpcMessage(message, metadata, _COMPRESSION[options.get("compression")])


def _add_input(message: Any, tensor: InputTensor) -> None:
    added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    if isinstance(tensor.content, Place):
        _set_place(added, tensor.content)
    else:
        message.raw_input_contents.append(_raw(tensor.datatype, tensor.content))


def _add_output(message: Any, output: OutputTensor) -> None:
    added = message.outputs.add(name=output.name)
    if output.place is not None:
        _set_place(added, output.place)


def _set_place(tensor: Any, place: Place) -> None:
    tensor.parameters["shared_memory_region"].string_param = place.region
    tensor.parameters["shared_memory_byte_size"].int64_param = place.byte_size
    if place.offset:
        tensor.parameters["shared_memory_offset"].int64_param = place.offset


def _raw(datatype: str, array: npt.NDArray[Any]) -> bytes:
    if datatype != "BYTES":
        return array.tobytes()
    serialized = serialize_byte_tensor(array)
    return bytes(serialized.item()) if serialized.size else b""


def _add_options(message: Any, options: Mapping[str, Any]) -> None:
    sequence_id = options.get("sequence_id")
    if sequence_id:
        _set(message.parameters["sequence_id"], "sequence_id", sequence_id)
        message.parameters["sequence_start"].bool_param = options.get("sequence_start", False)
        message.parameters["sequence_end"].bool_param = options.get("sequence_end", False)
    if options.get("priority"):
        message.parameters["priority"].uint64_param = options["priority"]
    if options.get("timeout") is not None:
        message.parameters["timeout"].int64_param = options["timeout"]


def _set(parameter: Any, name: str, value: Any) -> None:
    for kind, field in _FIELDS:
        if isinstance(value, kind):
            try:
                setattr(parameter, field, value)
            except ValueError:  # an int of more than 64 bits
                break
            return
    raise CallerError(f"parameter {name!r} is {value!r}; expected a str, a bool, an int of 64 bits, or a float")
