"""The wires between a client and a :class:`FakeServer`, in the messages of gRPC and HTTP, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import json_format
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from shm_backend_utils import dtypes
from shm_backend_utils.client import AsyncShmClient, ShmClient, aio, client
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.transports.grpc.codec import GrpcCodec, GrpcMessage
from shm_backend_utils.client.transports.http.codec import Answer, HttpCodec, HttpMessage
from shm_backend_utils.client.transports.messages import Codec
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import CallerError
from tests.unit.fake_server import Arrays, FakeServer, Order

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


Wire = Callable[[FakeServer, Any], Any]


def grpc_wire(server: FakeServer, message: GrpcMessage) -> Any:
    answer = GRPC_ANSWERS.get(message.procedure)
    if answer is not None:
        return answer(server, message.request)
    assert message.procedure == "ModelInfer"
    return grpc_response(message.request, server.infer(grpc_order(message)))


def grpc_order(message: GrpcMessage) -> Order:
    request = service_pb2.ModelInferRequest.FromString(message.request.SerializeToString())
    order = Order(
        request.model_name, request.model_version, values_of(request.parameters), dict(message.metadata or ())
    )
    contents = iter(request.raw_input_contents)
    for tensor in request.inputs:
        place = values_of(tensor.parameters)
        shape = tuple(tensor.shape)
        order.inputs[tensor.name] = (
            (*_place(place), tensor.datatype, shape) if place else _array(next(contents), tensor.datatype, shape)
        )
    if request.outputs:
        places = {tensor.name: values_of(tensor.parameters) for tensor in request.outputs}
        order.outputs = {name: _place(place) if place else None for name, place in places.items()}
    return order


def grpc_response(request: Any, outputs: Arrays) -> Any:
    answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, array in outputs.items():
        answer.outputs.add(name=name, datatype=dtypes.from_numpy(array.dtype, name).name, shape=array.shape)
        answer.raw_output_contents.append(_raw(array))
    return answer


def http_wire(server: FakeServer, message: HttpMessage) -> Answer:
    if not message.path.endswith("/infer"):
        return http_answer(server, message)
    name = unquote(message.path.split("/")[3])
    outputs = server.infer(_http_order(name, message))
    tensors = [_raw(array) for array in outputs.values()]
    described = [
        {
            "name": output,
            "datatype": dtypes.from_numpy(array.dtype, output).name,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for (output, array), data in zip(outputs.items(), tensors, strict=True)
    ]
    head = json.dumps({"model_name": name, "outputs": described}).encode()
    return Answer(200, {b"Inference-Header-Content-Length": b"%d" % len(head)}, b"".join((head, *tensors)))


def _http_order(name: str, message: HttpMessage) -> Order:
    body = b"".join(message.body or ())
    length = int(message.headers["Inference-Header-Content-Length"])
    head, at = json.loads(body[:length]), length
    version = message.path.split("/")[5] if "/versions/" in message.path else ""
    order = Order(name, version, head.get("parameters", {}), dict(message.headers))
    order.parameters.pop("binary_data_output", None)
    for tensor in head["inputs"]:
        told, shape = tensor["parameters"], tuple(tensor["shape"])
        if "shared_memory_region" in told:
            order.inputs[tensor["name"]] = (*_place(told), tensor["datatype"], shape)
        else:
            data = body[at : at + told["binary_data_size"]]
            at += len(data)
            order.inputs[tensor["name"]] = _array(data, tensor["datatype"], shape)
    if "outputs" in head:
        places = {tensor["name"]: tensor["parameters"] for tensor in head["outputs"]}
        order.outputs = {
            each: _place(place) if "shared_memory_region" in place else None for each, place in places.items()
        }
    return order


WIRES: dict[str, tuple[type[Codec], Wire]] = {"grpc": (GrpcCodec, grpc_wire), "http": (HttpCodec, http_wire)}


class FakeTransport(Transport):
    def __init__(self, server: FakeServer, protocol: str) -> None:
        kind, self._wire = WIRES[protocol]
        self.codec = kind()
        self.host = "localhost"
        self.address = f"{protocol}://localhost"
        self._server = server
        self.is_closed = False

    def send(self, message: Any, timeout_s: float) -> Any:
        return self._wire(self._server, message)

    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        if isinstance(message, HttpMessage):
            raise CallerError("HTTP has no streams")
        for outputs in self._server.stream(grpc_order(message)):
            yield grpc_response(message.request, outputs)

    def close(self) -> None:
        self.is_closed = True


class AsyncFakeTransport(AsyncTransport):
    """For tasks. Requests wait in threads of the loop's, others are answered at once."""

    def __init__(self, server: FakeServer, protocol: str) -> None:
        self._inner = FakeTransport(server, protocol)
        self.codec = self._inner.codec
        self.host = self._inner.host
        self.address = self._inner.address

    async def send(self, message: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        return await asyncio.to_thread(self._inner.send, message, timeout_s)

    async def stream(self, message: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        for answer in self._inner.stream(message, timeout_s):
            await asyncio.sleep(0)
            yield answer

    async def close(self) -> None:
        self._inner.close()


def client_of(server: FakeServer, protocol: str = "grpc", **named: Any) -> ShmClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "connect", lambda *_: FakeTransport(server, protocol))
        return ShmClient("localhost:8001", **named)


@contextlib.asynccontextmanager
async def async_client_of(
    server: FakeServer, protocol: str = "grpc", **named: Any
) -> AsyncGenerator[AsyncShmClient, None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, protocol))
        async with AsyncShmClient("localhost:8001", **named) as made:
            yield made


def _place(told: dict[str, Any]) -> tuple[str, int, int]:
    return told["shared_memory_region"], told.get("shared_memory_offset", 0), told["shared_memory_byte_size"]


def _array(data: bytes, datatype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if datatype == "BYTES":
        strings: npt.NDArray[Any] = deserialize_bytes_tensor(data)
        return strings.reshape(shape)
    return np.frombuffer(data, dtypes.BY_NAME[datatype].numpy).reshape(shape)


def _raw(array: npt.NDArray[Any]) -> bytes:
    if dtypes.from_numpy(array.dtype, "") is BYTES:
        serialized = serialize_byte_tensor(array)
        return bytes(serialized.item()) if serialized.size else b""
    return array.tobytes()
