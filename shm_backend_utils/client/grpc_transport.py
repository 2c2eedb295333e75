"""Requests over gRPC."""

from __future__ import annotations

import asyncio
import queue
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import tritonclient.grpc
import tritonclient.grpc.aio
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from ..errors import ClosedError, ShmError
from ..protocol.descriptor import GENERATION_PARAMETER
from .errors import deadline_exceeded, translated
from .grpc_address import GrpcAddress
from .grpc_message import GrpcMessage, encode
from .options import RequestOptions
from .transport import Request, Transport

__all__ = ["AsyncGrpcTransport", "GrpcTransport", "Metadata"]


Metadata = Sequence[tuple[str, str]] | None


class _Grpc(Transport):
    """What both have in common. They call the service that tritonclient brings without its client in between.

    So a call that is made again is encoded once; and blocking or not, the calls are the same.

    Parameters
    ----------
    address : GrpcAddress
    complete : callable, optional
        Takes the metadata of a call, and returns what to send with it instead. For every call but streams.
    """

    def __init__(self, address: GrpcAddress, complete: Callable[[Metadata], Metadata] | None = None) -> None:
        self._complete = complete
        self.host = address.host
        self.address = str(address)
        self._module = tritonclient.grpc
        self._grpc_address = address
        self._channel = self._open_channel()
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def encode(self, request: Request) -> GrpcMessage:
        return encode(request)

    async def infer(self, message: GrpcMessage, timeout_s: float, generation: int = 0) -> Any:
        if generation:
            message.request.parameters[GENERATION_PARAMETER].int64_param = generation
        return tritonclient.grpc.InferResult(await self._ask(self._service.ModelInfer, timeout_s, message))

    async def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        question = service_pb2.ModelConfigRequest(name=model, version=version)
        answer = await self._ask(self._service.ModelConfig, timeout_s, GrpcMessage(question))
        config: dict[str, Any] = json_format.MessageToDict(answer.config, preserving_proto_field_name=True)
        return config

    async def register(self, name: str, key: str, byte_size: int, timeout_s: float) -> None:
        order = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
        await self._ask(self._service.SystemSharedMemoryRegister, timeout_s, GrpcMessage(order))

    async def unregister(self, name: str, timeout_s: float) -> None:
        order = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        await self._ask(self._service.SystemSharedMemoryUnregister, timeout_s, GrpcMessage(order))

    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        output = response.get_output(name)
        return None if output is None else (output.datatype, tuple(output.shape))

    @abstractmethod
    def _open_channel(self) -> Any: ...

    def _metadata(self, message: GrpcMessage) -> Metadata:
        return message.metadata if self._complete is None else self._complete(message.metadata)

    @abstractmethod
    async def _ask(self, procedure: Any, timeout_s: float, message: GrpcMessage) -> Any: ...

    def _streaming_client(self, module: Any) -> Any:
        address = self._grpc_address
        return module.InferenceServerClient(
            address.target, creds=address.credentials, channel_args=list(address.options)
        )

    def _error(self, error: Any) -> ShmError:
        return translated(str(error.code()), error.details() or "", self.address)


class GrpcTransport(_Grpc):
    """For threads. May be used from several at once."""

    async def close(self) -> None:
        self._channel.close()

    async def stream(self, request: Request, patience_s: float) -> AsyncGenerator[Any, None]:
        client = self._streaming_client(tritonclient.grpc)  # it has one stream at a time
        is_over = False
        answers: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        try:
            client.start_stream(lambda result, error: answers.put((result, error)), **_of_stream(request.options))
            client.async_stream_infer(enable_empty_final_response=True, **_without_headers(self._arguments(request)))
            while True:
                try:
                    result, error = answers.get(timeout=patience_s)
                except queue.Empty:
                    raise deadline_exceeded() from None
                if error is not None:
                    raise translated(error.status(), error.message() or "", self.address)
                is_over = _is_final(result)
                if not is_over or result.get_response().outputs:
                    yield result
                if is_over:
                    return
        finally:
            client.stop_stream(cancel_requests=not is_over)
            client.close()

    def _open_channel(self) -> Any:
        return self._grpc_address.channel(grpc)

    async def _ask(self, procedure: Any, timeout_s: float, message: GrpcMessage) -> Any:
        try:
            return procedure(
                message.request, timeout=timeout_s, metadata=self._metadata(message), compression=message.compression
            )
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError as error:
            if "closed channel" in str(error):
                raise ClosedError("this client") from None
            raise


class AsyncGrpcTransport(_Grpc):
    """For tasks of one event loop, which must be running when it is made."""

    async def close(self) -> None:
        await self._channel.close()

    async def stream(self, request: Request, patience_s: float) -> AsyncGenerator[Any, None]:
        client = self._streaming_client(tritonclient.grpc.aio)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            # No more will come, so the server ends the stream after the last response.
            yield _without_headers(self._arguments(request))

        answers = client.stream_infer(requests(), **_of_stream(request.options))
        try:
            while True:
                try:
                    result, error = await asyncio.wait_for(answers.__anext__(), patience_s)
                except asyncio.TimeoutError:
                    raise deadline_exceeded() from None
                except StopAsyncIteration:
                    return
                if error is not None:
                    raise error
                yield result
        except grpc.RpcError as error:
            raise self._error(error) from None
        except InferenceServerException as error:
            if isinstance(error, ShmError):
                raise
            raise translated(error.status(), error.message() or "", self.address) from None
        finally:
            answers.cancel()
            await client.close()

    def _open_channel(self) -> Any:
        return self._grpc_address.channel(grpc.aio)

    async def _ask(self, procedure: Any, timeout_s: float, message: GrpcMessage) -> Any:
        try:
            return await procedure(
                message.request, timeout=timeout_s, metadata=self._metadata(message), compression=message.compression
            )
        except grpc.RpcError as error:
            raise self._error(error) from None
        except grpc.aio.UsageError:
            raise ClosedError("this client") from None


def _of_stream(options: RequestOptions) -> dict[str, Any]:
    headers = options.get("headers")
    return {
        "headers": None if headers is None else dict(headers),
        "compression_algorithm": options.get("compression"),
    }


def _without_headers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop what belongs to a stream, not to a request in it."""
    return {name: value for name, value in arguments.items() if name != "headers"}


def _is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)
