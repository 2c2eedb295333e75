"""The emulated server's answer to each message of the gRPC protocol, as the server's gRPC front end gives it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from ...dtypes import BY_NAME, BYTES
from ..emulator import TensorContent
from ..emulator.tensor import serialize_byte_tensor
from .loaded_model import LoadedModel
from .model_folder import datatype_of
from .regions import RegisteredRegions
from .requests import Answer, Input, Outcome, Request, ServerError
from .server import EmulatedServer

__all__ = ["FINAL", "PROCEDURES", "STREAM", "infer", "read_request", "stream_infer", "write_response"]

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"
_REGION: Final = "shared_memory_region"
_BYTE_SIZE: Final = "shared_memory_byte_size"
_OFFSET: Final = "shared_memory_offset"
_CLASSIFICATION: Final = "classification"
_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_FLAGS: Final = {"sequence_start": 1, "sequence_end": 2}
_RESERVED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "priority": ("priority", ("int64_param", "uint64_param")),
    "timeout": ("timeout_us", ("int64_param",)),
    "sequence_id": ("sequence_id", ("int64_param", "string_param")),
    **dict.fromkeys(_FLAGS, ("flags", ("bool_param",))),
}
"""By parameter: the request's field, and the kinds of value that it may have."""

Procedure = Callable[[EmulatedServer, Any], Any]
"""Takes a request message, and returns the answer; raises ServerError."""
STREAM: Final = "ModelStreamInfer"
_VERSION: Final = "2.73.0"
_EXTENSIONS: Final = (
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


class InferMessage(NamedTuple):
    """The request in a message."""

    request: Request
    places: Mapping[str, memoryview]  # outputs that go into registered memory
    wants_empty_final: bool  # an empty response is to end a stream


@contextlib.contextmanager
def read_request(message: Any, regions: RegisteredRegions) -> Iterator[InferMessage]:
    """Yield the request in a ``ModelInferRequest``; registered memory is in use while the block runs."""
    with contextlib.ExitStack() as views:
        request = Request({}, model=message.model_name, version=message.model_version, request_id=message.id)
        parameters: dict[str, Any] = {}
        wants_empty_final = False
        for name, value in message.parameters.items():
            kind = value.WhichOneof("parameter_choice")
            chosen = getattr(value, kind) if kind is not None else None
            if name == EMPTY_FINAL:
                if kind != "bool_param":
                    raise ServerError(f"invalid value type for '{name}' parameter, expected bool_param.")
                wants_empty_final = bool(chosen)
            elif name.startswith("triton_"):
                raise ServerError(
                    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                    f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
                )
            elif name in _RESERVED:
                _take_reserved(request, name, kind, chosen)
            elif kind in ("int64_param", "bool_param", "string_param", "double_param"):
                parameters[name] = chosen
            else:
                raise ServerError(
                    f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
                )
        request.parameters = parameters
        request.inputs = _inputs(message, regions, views)
        request.outputs = [output.name for output in message.outputs] or None
        places = {}
        for output in message.outputs:
            view = _place(output, regions, views)
            if view is not None:
                if _CLASSIFICATION in output.parameters:
                    raise ServerError("output can't set both 'shared_memory_region' and 'classification'")
                places[output.name] = view
            elif _CLASSIFICATION in output.parameters:
                raise ServerError("the harness does not support classification of outputs", "UNSUPPORTED")
        yield InferMessage(request, places, wants_empty_final)


def write_response(model: LoadedModel, request: Request, outcome: Outcome, places: Mapping[str, memoryview]) -> Any:
    """Return a response as a ``ModelInferResponse``, and copy outputs to their places; or raise ServerError."""
    if outcome.error is not None:
        raise ServerError(*outcome.error)
    response = service_pb2.ModelInferResponse(model_name=model.name, model_version=model.version, id=request.request_id)
    for name, value in json.loads(outcome.parameters or "{}").items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param" if isinstance(value, int) else "string_param"
        setattr(response.parameters[name], kind, value)
    for tensor in outcome.outputs:
        if tensor.array is None:
            raise ServerError(f"output '{tensor.name}' is on a GPU, and the harness has none", "UNSUPPORTED")
        content = _raw(tensor, tensor.array)
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        place = places.get(tensor.name)
        if place is None:
            response.raw_output_contents.append(content)
            continue
        if len(content) > len(place):
            raise ServerError(
                f"shared memory size specified with the request for output '{tensor.name}' ({len(place)} bytes) should "
                f"be at least {len(content)} bytes to hold the results",
                "INTERNAL",
            )
        place[: len(content)] = content
        response.raw_output_contents.append(b"")
    return response


def _inputs(message: Any, regions: RegisteredRegions, views: contextlib.ExitStack) -> dict[str, Input]:
    found: dict[str, Input] = {}
    raw = iter(message.raw_input_contents)
    for tensor in message.inputs:
        content: Any = _place(tensor, regions, views)
        if content is None:
            content = next(raw, None)
            if tensor.HasField("contents"):
                if content is not None:
                    raise ServerError(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{tensor.name}' for model '{message.model_name}'"
                    )
                content = _explicit(tensor)
            if content is None:
                raise ServerError(
                    f"unable to find data for input tensor '{tensor.name}' for model '{message.model_name}' in request."
                )
        if tensor.name in found:
            raise ServerError(
                f"[request id: {message.id or '<id_unknown>'}] input '{tensor.name}' already exists in request"
            )
        found[tensor.name] = Input(tensor.name, tensor.datatype, tuple(tensor.shape), content)
    return found


def _explicit(tensor: Any) -> bytes | None:
    field = _CONTENTS.get(tensor.datatype)
    values = getattr(tensor.contents, field) if field else ()
    if not len(values):
        return None
    row = BY_NAME[tensor.datatype]
    array = np.array(list(values), row.numpy)
    return (serialize_byte_tensor(array) or b"") if row is BYTES else array.tobytes()


def _place(tensor: Any, regions: RegisteredRegions, views: contextlib.ExitStack) -> memoryview | None:
    parameters = tensor.parameters
    if _REGION not in parameters:
        return None
    for name, kind in ((_REGION, "string_param"), (_BYTE_SIZE, "int64_param"), (_OFFSET, "int64_param")):
        if name in parameters and parameters[name].WhichOneof("parameter_choice") != kind:
            raise ServerError(f"invalid value type for '{name}' parameter for tensor '{tensor.name}', expected {kind}.")
    if _BYTE_SIZE not in parameters:
        raise ServerError(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{tensor.name}'"
        )
    offset = parameters[_OFFSET].int64_param if _OFFSET in parameters else 0
    view = regions.view(parameters[_REGION].string_param, offset, parameters[_BYTE_SIZE].int64_param)
    views.callback(_release, view)
    return view


def _release(view: memoryview) -> None:
    with contextlib.suppress(BufferError):  # an array of an abandoned request is still over it
        view.release()


def _raw(tensor: TensorContent, array: npt.NDArray[Any]) -> bytes:
    if tensor.datatype == BYTES.name:
        return serialize_byte_tensor(array) or b""
    return array.tobytes()


def _take_reserved(request: Request, name: str, kind: str | None, value: Any) -> None:
    field, kinds = _RESERVED[name]
    if kind not in kinds:
        raise ServerError(f"invalid value type for '{name}' parameter, expected {' or '.join(kinds)}.")
    if name == "priority" and value < 0:
        raise ServerError("invalid value for 'priority', expected value >= 0.")
    setattr(request, field, request.flags | _FLAGS[name] * value if name in _FLAGS else value)


def infer(server: EmulatedServer, message: Any, began: Callable[[Answer], object]) -> Any:
    """Return the ``ModelInferResponse`` to a request; ``began`` gets the answer before the model runs, to cancel it."""
    with read_request(message, server.regions) as (request, places, _):
        model = server.model(request.model, request.version)
        if model.is_decoupled:
            raise ServerError("ModelInfer RPC doesn't support models with decoupled transaction policy", "UNSUPPORTED")
        pending = model.pending(request)
        began(pending.answer)
        model.run(pending)
        return write_response(model, request, pending.answer.only(), places)


def stream_infer(server: EmulatedServer, message: Any, timeout_s: float) -> Iterator[Any]:
    """Yield the ``ModelStreamInferResponse`` messages that answer one request; TimeoutError if none comes in time."""
    answered = service_pb2.ModelStreamInferResponse
    try:
        with read_request(message, server.regions) as (request, places, wants_empty_final):
            model = server.model(request.model, request.version)
            answer = server.execute_aside(request)
            try:
                for outcome in answer.outcomes(timeout_s):
                    if outcome.is_empty and not (wants_empty_final and model.is_decoupled):
                        continue
                    if outcome.error is not None:
                        part = answered(error_message=outcome.error[0])
                    else:
                        part = answered(infer_response=write_response(model, request, outcome, places))
                    part.infer_response.parameters[FINAL].bool_param = outcome.is_final
                    yield part
            finally:
                answer.cancel()
    except ServerError as error:
        yield answered(error_message=error.message)


def _model_metadata(server: EmulatedServer, message: Any) -> Any:
    model = server.model(message.name, message.version)
    config = model.config
    answer = service_pb2.ModelMetadataResponse(name=model.name, versions=[model.version], platform=config.backend)
    batch = [-1] if config.max_batch_size > 0 else []
    for tensors, into in ((config.input, answer.inputs), (config.output, answer.outputs)):
        for tensor in tensors:
            into.add(name=tensor.name, datatype=datatype_of(tensor), shape=[*batch, *tensor.dims])
    return answer


def _model_statistics(server: EmulatedServer, message: Any) -> Any:
    if not message.name:
        models = server.models()
    else:
        try:
            models = [server.model(message.name, message.version)]
        except ServerError:
            raise ServerError(f"requested model '{message.name}' is not available") from None
    statistics = [model.statistics.message(model.name, model.version) for model in models]
    return service_pb2.ModelStatisticsResponse(model_stats=statistics)


def _repository_index(server: EmulatedServer, message: Any) -> Any:
    answer = service_pb2.RepositoryIndexResponse()
    for model in server.models():
        answer.models.add(name=model.name, version=model.version, state="READY")
    return answer


def _load(server: EmulatedServer, message: Any) -> Any:
    if message.parameters:
        raise ServerError("the harness loads models from their folders alone, without parameters", "UNSUPPORTED")
    server.load_by_name(message.model_name)
    return service_pb2.RepositoryModelLoadResponse()


def _unload(server: EmulatedServer, message: Any) -> Any:
    server.unload(message.model_name)
    return service_pb2.RepositoryModelUnloadResponse()


def _register(server: EmulatedServer, message: Any) -> Any:
    server.regions.register(message.name, message.key, message.offset, message.byte_size)
    return service_pb2.SystemSharedMemoryRegisterResponse()


def _unregister(server: EmulatedServer, message: Any) -> Any:
    server.regions.unregister(message.name)
    return service_pb2.SystemSharedMemoryUnregisterResponse()


def _status(server: EmulatedServer, message: Any) -> Any:
    answer = service_pb2.SystemSharedMemoryStatusResponse()
    for name, key, offset, byte_size, _ in server.regions.find(message.name):
        region = answer.regions[name]
        region.name, region.key, region.offset, region.byte_size = name, key, offset, byte_size
    return answer


def _cuda_register(server: EmulatedServer, message: Any) -> Any:
    raise ServerError("the harness has no GPU, so it cannot register memory of one", "UNSUPPORTED")


PROCEDURES: Final[Mapping[str, Procedure]] = {
    "ServerLive": lambda server, message: service_pb2.ServerLiveResponse(live=True),
    "ServerReady": lambda server, message: service_pb2.ServerReadyResponse(
        ready=all(model.is_ready() for model in server.models())
    ),
    "ServerMetadata": lambda server, message: service_pb2.ServerMetadataResponse(
        name="triton", version=_VERSION, extensions=_EXTENSIONS
    ),
    "ModelReady": lambda server, message: service_pb2.ModelReadyResponse(
        ready=server.model(message.name, message.version).is_ready()
    ),
    "ModelMetadata": _model_metadata,
    "ModelConfig": lambda server, message: service_pb2.ModelConfigResponse(
        config=server.model(message.name, message.version).config
    ),
    "ModelStatistics": _model_statistics,
    "RepositoryIndex": _repository_index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "SystemSharedMemoryRegister": _register,
    "SystemSharedMemoryUnregister": _unregister,
    "SystemSharedMemoryStatus": _status,
    "CudaSharedMemoryStatus": lambda server, message: service_pb2.CudaSharedMemoryStatusResponse(),
    "CudaSharedMemoryRegister": _cuda_register,
}
"""Every procedure that answers with one message and waits for no model, by its name in the service."""
