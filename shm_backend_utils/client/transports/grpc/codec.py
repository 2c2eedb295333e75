"""Messages of the KServe v2 protocol over gRPC, as Triton speaks it (``grpc_service.proto``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, Final, NamedTuple

import grpc
import numpy.typing as npt
from google.protobuf.message import Message
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from ....errors import CallerError, ShmError
from ....model_spec import BATCH_CARRIER
from ....protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from ...errors import translated
from ...options import RequestOptions
from ..messages import Codec, InputTensor, Place, Question
from .http2 import Reply

__all__ = ["GrpcCodec", "GrpcMessage", "Metadata", "error_of"]

Metadata = Sequence[tuple[str, str]] | None

_COMPRESSION: Final = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
_STATUS: Final = {status.value[0]: str(status) for status in grpc.StatusCode}
_FIELDS: Final = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))
_PROCEDURES: Final[Mapping[Question, str]] = {
    "server live": "ServerLive",
    "server ready": "ServerReady",
    "server metadata": "ServerMetadata",
    "repository index": "RepositoryIndex",
    "model ready": "ModelReady",
    "model metadata": "ModelMetadata",
    "model config": "ModelConfig",
    "model statistics": "ModelStatistics",
}


class GrpcMessage(NamedTuple):
    """The arguments of one call of the service."""

    procedure: str
    request: Any  # a protobuf message
    metadata: Metadata = None
    compression: Any = None  # a ``grpc.Compression``


class GrpcCodec(Codec):
    """Makes the messages of one client; ``complete`` takes a call's metadata and returns the metadata to send."""

    reads_plain_outputs = True
    inline_bytes = 16 * 2**10
    result = InferResult

    def __init__(self, complete: Callable[[Metadata], Metadata] | None = None) -> None:
        self._complete = complete

    def infer(
        self,
        model: str,
        options: RequestOptions,
        *,
        inputs: Sequence[InputTensor] = (),
        outputs: Mapping[str, Place | None] | None = None,
        batch_size: int | None = None,
        slot: tuple[str, int] | None = None,
    ) -> GrpcMessage:
        message = service_pb2.ModelInferRequest(model_name=model)
        if batch_size is not None:
            message.inputs.add(name=BATCH_CARRIER, datatype="UINT8", shape=(batch_size, 0))
            message.raw_input_contents.append(b"")
        for name, datatype, shape, content in inputs:
            added = message.inputs.add(name=name, datatype=datatype, shape=shape)
            if isinstance(content, Place):
                _set_place(added, content)
            else:
                message.raw_input_contents.append(_strings(content) if datatype == "BYTES" else content.tobytes())
        for name, place in () if outputs is None else outputs.items():
            wanted = message.outputs.add(name=name)
            if place is not None:
                _set_place(wanted, place)
        if slot is not None:
            message.parameters[SLOT_PARAMETER].string_param, message.parameters[GENERATION_PARAMETER].int64_param = slot
        if not options and self._complete is None:
            return GrpcMessage("ModelInfer", message)
        _add_options(message, options)
        headers = options.get("headers")
        metadata = None if headers is None else [(name.lower(), value) for name, value in headers.items()]
        return self._message("ModelInfer", message, metadata, _COMPRESSION[options.get("compression")])

    def for_slot(
        self, model: str, address: str, outputs: Iterable[str] | None, batch_size: int | None, options: RequestOptions
    ) -> Callable[[int], GrpcMessage]:
        anew = super().for_slot(model, address, outputs, batch_size, options)
        if self._complete is not None:  # each message may have other metadata
            return anew
        message: GrpcMessage = anew(0)
        generation_parameter = message.request.parameters[GENERATION_PARAMETER]

        def message_of(generation: int) -> GrpcMessage:
            generation_parameter.int64_param = generation
            return message

        return message_of

    def ask(self, question: Question, model: str = "", version: str = "") -> GrpcMessage:
        procedure = _PROCEDURES[question]
        names = {"name": model, "version": version} if procedure.startswith("Model") else {}
        return self._message(procedure, getattr(service_pb2, f"{procedure}Request")(**names))

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> GrpcMessage:
        order = service_pb2.RepositoryModelLoadRequest(model_name=model)
        for name, value in parameters.items():
            if isinstance(value, str):
                order.parameters[name].string_param = value
            else:
                order.parameters[name].bytes_param = value
        return self._message("RepositoryModelLoad", order)

    def unload(self, model: str, *, dependents: bool) -> GrpcMessage:
        order = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        order.parameters["unload_dependents"].bool_param = dependents
        return self._message("RepositoryModelUnload", order)

    def register(self, name: str, key: str, byte_size: int) -> GrpcMessage:
        order = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
        return self._message("SystemSharedMemoryRegister", order)

    def unregister(self, name: str) -> GrpcMessage:
        order = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        return self._message("SystemSharedMemoryUnregister", order)

    def plain_outputs(self, answer: Any) -> Mapping[str, tuple[str, Sequence[int], bytes]]:
        contents = answer.raw_output_contents
        if len(contents) != len(answer.outputs):
            return {}
        return {each.name: (each.datatype, each.shape, contents[at]) for at, each in enumerate(answer.outputs)}

    def as_dict(self, answer: Any) -> dict[str, Any]:
        return _plain(answer.config if isinstance(answer, service_pb2.ModelConfigResponse) else answer)

    def says_so(self, answer: Any) -> bool:
        return all(self.as_dict(answer).values())

    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        output = response.get_output(name)
        return None if output is None else (output.datatype, tuple(output.shape))

    def _message(self, procedure: str, request: Any, metadata: Metadata = None, compression: Any = None) -> GrpcMessage:
        if self._complete is not None:
            metadata = self._complete(metadata)
        return GrpcMessage(procedure, request, metadata, compression)


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as Triton's JSON over HTTP has it: with fields that are 0 or empty, and with real integers."""
    return {
        field.name: _plain_value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        of_value = field.message_type.fields_by_name["value"]
        return {key: _plain_value(of_value, value[key]) for key in value}
    if isinstance(value, MutableSequence):
        return [_plain_value(field, each) for each in value]
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)  # later servers may have more values
        return str(value) if known is None else known.name
    return _plain(value) if isinstance(value, Message) else value


def _set_place(tensor: Any, place: Place) -> None:
    tensor.parameters["shared_memory_region"].string_param = place.region
    tensor.parameters["shared_memory_byte_size"].int64_param = place.byte_size
    if place.offset:
        tensor.parameters["shared_memory_offset"].int64_param = place.offset


def _strings(array: npt.NDArray[Any]) -> bytes:
    serialized = serialize_byte_tensor(array)
    return bytes(serialized.item()) if serialized.size else b""


def _add_options(message: Any, options: Mapping[str, Any]) -> None:
    message.model_version = options.get("model_version", "")
    message.id = options.get("request_id", "")
    for name, value in options.get("parameters", {}).items():
        _set(message.parameters[name], name, value)
    sequence_id = options.get("sequence_id")
    if sequence_id:
        _set(message.parameters["sequence_id"], "sequence_id", sequence_id)
        message.parameters["sequence_start"].bool_param = options.get("sequence_start", False)
        message.parameters["sequence_end"].bool_param = options.get("sequence_end", False)
    if options.get("priority"):
        message.parameters["priority"].uint64_param = options["priority"]
    if options.get("queue_timeout_us") is not None:
        message.parameters["timeout"].int64_param = options["queue_timeout_us"]


def _set(parameter: Any, name: str, value: Any) -> None:
    for kind, field in _FIELDS:
        if isinstance(value, kind):
            try:
                setattr(parameter, field, value)
            except ValueError:  # an int of more than 64 bits
                break
            return
    raise CallerError(f"parameter {name!r} is {value!r}; expected a str, a bool, an int of 64 bits, or a float")


def error_of(reply: Reply, address: str) -> ShmError:
    """Return the error for a reply whose status is not 0."""
    return translated(_STATUS.get(reply.status), reply.details, address)
