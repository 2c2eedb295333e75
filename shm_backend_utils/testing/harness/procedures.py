"""What the emulated server does with each message of the gRPC protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from google.protobuf.descriptor import EnumValueDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from ...dtypes import from_config
from .loaded_model import LoadedModel
from .messages import FINAL, read_request, write_response
from .requests import Answer, ServerError
from .server import EmulatedServer

__all__ = ["PROCEDURES", "STREAM", "infer", "stream_infer"]

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


def infer(server: EmulatedServer, message: Any, began: Callable[[Answer], object]) -> Any:
    """Return the ``ModelInferResponse`` that answers a request.

    ``began`` gets the answer before the model does anything: cancelling it ends the wait. ServerError if the server
    refuses it, or the model failed it.
    """
    with read_request(message, server.regions) as (request, places, _):
        model = server.model(request.model, request.version)
        if model.is_decoupled:
            raise ServerError("ModelInfer RPC doesn't support models with decoupled transaction policy", "UNSUPPORTED")
        pending = model.pending(request)
        began(pending.answer)
        model.run(pending)
        return write_response(model, request, pending.answer.only(), places)


def stream_infer(server: EmulatedServer, message: Any, patience_s: float) -> Iterator[Any]:
    """Yield the ``ModelStreamInferResponse`` messages that answer one request; TimeoutError if none comes in time."""
    answered = service_pb2.ModelStreamInferResponse
    try:
        with read_request(message, server.regions) as (request, places, wants_empty_final):
            model = server.model(request.model, request.version)
            answer = server.execute_aside(request)
            try:
                for outcome in answer.outcomes(patience_s):
                    if outcome.is_empty and not (wants_empty_final and model.is_decoupled):
                        continue
                    if outcome.error is not None:
                        told = answered(error_message=outcome.error[0])
                    else:
                        told = answered(infer_response=write_response(model, request, outcome, places))
                    told.infer_response.parameters[FINAL].bool_param = outcome.is_final
                    yield told
            finally:
                answer.cancel()
    except ServerError as error:
        yield answered(error_message=error.message)


def _server_live(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.ServerLiveResponse(live=True)


def _server_ready(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.ServerReadyResponse(ready=all(model.is_ready() for model in server.models()))


def _server_metadata(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.ServerMetadataResponse(name="triton", version=_VERSION, extensions=_EXTENSIONS)


def _model_ready(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.ModelReadyResponse(ready=server.model(message.name, message.version).is_ready())


def _model_metadata(server: EmulatedServer, message: Any) -> Any:
    model = server.model(message.name, message.version)
    config = model.config
    told = service_pb2.ModelMetadataResponse(name=model.name, versions=[model.version], platform=config.backend)
    batch = [-1] if config.max_batch_size > 0 else []
    for tensors, into in ((config.input, told.inputs), (config.output, told.outputs)):
        for tensor in tensors:
            into.add(name=tensor.name, datatype=_datatype(tensor), shape=[*batch, *tensor.dims])
    return told


def _model_config(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.ModelConfigResponse(config=server.model(message.name, message.version).config)


def _model_statistics(server: EmulatedServer, message: Any) -> Any:
    if not message.name:
        models = server.models()
    else:
        try:
            models = [server.model(message.name, message.version)]
        except ServerError:
            raise ServerError(f"requested model '{message.name}' is not available") from None
    return service_pb2.ModelStatisticsResponse(model_stats=[_statistics(model) for model in models])


def _repository_index(server: EmulatedServer, message: Any) -> Any:
    told = service_pb2.RepositoryIndexResponse()
    for model in server.models():
        told.models.add(name=model.name, version=model.version, state="READY")
    return told


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
    told = service_pb2.SystemSharedMemoryStatusResponse()
    for name, key, offset, byte_size, _ in server.regions.find(message.name):
        region = told.regions[name]
        region.name, region.key, region.offset, region.byte_size = name, key, offset, byte_size
    return told


def _cuda_status(server: EmulatedServer, message: Any) -> Any:
    return service_pb2.CudaSharedMemoryStatusResponse()


def _cuda_register(server: EmulatedServer, message: Any) -> Any:
    raise ServerError("the harness has no GPU, so that no memory of one can be registered", "UNSUPPORTED")


PROCEDURES: Final[Mapping[str, Procedure]] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ServerMetadata": _server_metadata,
    "ModelReady": _model_ready,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "ModelStatistics": _model_statistics,
    "RepositoryIndex": _repository_index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "SystemSharedMemoryRegister": _register,
    "SystemSharedMemoryUnregister": _unregister,
    "SystemSharedMemoryStatus": _status,
    "CudaSharedMemoryStatus": _cuda_status,
    "CudaSharedMemoryRegister": _cuda_register,
}
"""Every procedure that answers with one message and waits for no model, by its name in the service."""


def _statistics(model: LoadedModel) -> Any:
    return model.statistics.message(model.name, model.version)


def _datatype(tensor: Any) -> str:
    named: EnumValueDescriptor = model_config_pb2.DataType.DESCRIPTOR.values_by_number[tensor.data_type]
    row = from_config(named.name)
    return "" if row is None else row.name
