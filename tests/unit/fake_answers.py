"""What the fake server answers to all but requests: in the messages of gRPC or HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.transports.http.codec import Answer, HttpMessage
from tests.unit.fake_server import FakeServer

__all__ = ["GRPC_ANSWERS", "http_answer", "values_of"]

_EMPTY: Final = Answer(200, {}, b"")


def values_of(parameters: Any) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def _config(server: FakeServer, request: Any) -> Any:
    answer = service_pb2.ModelConfigResponse()
    json_format.ParseDict(server.config(request.name), answer.config)
    return answer


def _load(server: FakeServer, request: Any) -> Any:
    server.loads.append((request.model_name, values_of(request.parameters)))
    return service_pb2.RepositoryModelLoadResponse()


def _unload(server: FakeServer, request: Any) -> Any:
    server.unloads.append((request.model_name, request.parameters["unload_dependents"].bool_param))
    return service_pb2.RepositoryModelUnloadResponse()


def _index(server: FakeServer) -> list[dict[str, str]]:
    return [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in server.configs]


GRPC_ANSWERS: Final[Mapping[str, Callable[[FakeServer, Any], Any]]] = {
    "ServerLive": lambda server, _: service_pb2.ServerLiveResponse(live=server.is_live),
    "ServerReady": lambda server, _: service_pb2.ServerReadyResponse(ready=server.is_ready),
    "ServerMetadata": lambda server, _: service_pb2.ServerMetadataResponse(**server.metadata("")),
    "ModelMetadata": lambda server, request: service_pb2.ModelMetadataResponse(**server.metadata(request.name)),
    "ModelReady": lambda server, request: service_pb2.ModelReadyResponse(ready=bool(server.config(request.name))),
    "ModelConfig": _config,
    "RepositoryIndex": lambda server, _: json_format.ParseDict(
        {"models": _index(server)}, service_pb2.RepositoryIndexResponse()
    ),
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "SystemSharedMemoryRegister": lambda server, asked: server.register(asked.name, asked.key, asked.byte_size),
    "SystemSharedMemoryUnregister": lambda server, asked: server.unregister(asked.name),
}
"""By the procedure's name: what it answers to a request."""


def http_answer(server: FakeServer, message: HttpMessage) -> Answer:
    _, _, *parts = message.path.split("/")
    body = json.loads(b"".join(message.body or ()) or b"{}")
    match parts:
        case []:
            return _json(server.metadata(""))
        case ["health", question]:
            if server.is_live if question == "live" else server.is_ready:
                return _EMPTY
            raise InferenceError("the answer is empty", "400")
        case ["systemsharedmemory", "region", name, "register"]:
            server.register(unquote(name), body["key"], body["byte_size"])
        case ["systemsharedmemory", "region", name, "unregister"]:
            server.unregister(unquote(name))
        case ["repository", "index"]:
            return _json(_index(server))
        case ["repository", "models", name, "load"]:
            server.loads.append((unquote(name), body["parameters"]))
        case ["repository", "models", name, "unload"]:
            server.unloads.append((unquote(name), body["parameters"]["unload_dependents"]))
        case _:
            return _of_models(server, parts[1:])
    return _EMPTY


def _of_models(server: FakeServer, parts: list[str]) -> Answer:
    match [unquote(part) for part in parts]:
        case [name, *_, "ready"]:
            server.config(name)
            return _EMPTY
        case [*names, "config"]:
            return _json(server.config(names[0] if names else ""))
        case [name, *_]:
            return _json(server.metadata(name))
    raise AssertionError(parts)


def _json(said: Any) -> Answer:
    return Answer(200, {}, json.dumps(said).encode())
