"""What a server and a harness are asked by: the messages of the gRPC protocol, and answers to compare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.testing.harness import ModelHarness

MODELS: Final = Path(__file__).resolve().parents[2] / "upstream_models"
_TIMEOUT_S: Final = 60
_FIELDS: Final = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


class Tensor(NamedTuple):
    datatype: str
    shape: Sequence[int]
    content: bytes

    @classmethod
    def of(cls, array: Any) -> Tensor:
        floats = np.asarray(array, np.float32)
        return cls("FP32", floats.shape, floats.tobytes())


class Answer(NamedTuple):
    """An answer: its error's code and text, or the message."""

    status: str
    text: str
    message: Any = None


Told = tuple[str, list[str], bool | None]
"""Of a stream's response: its error, its outputs, and whether it says that it is the last."""


def _told(answer: Answer) -> Told:
    final = answer.message.parameters
    is_final = final["triton_final_response"].bool_param if "triton_final_response" in final else None
    return answer.text, [output.name for output in answer.message.outputs], is_final


class Wire(ABC):
    """A way to a server or a harness."""

    @abstractmethod
    def send(self, procedure: str, message: Any) -> Answer:
        """Send a message, and return the answer."""

    @abstractmethod
    def responses(self, message: Any) -> list[Answer]:
        """Return the responses of a stream, each with its error's text."""

    def stream(self, message: Any) -> list[Told]:
        """Return for each response its error, its outputs, and whether it says that it is the last."""
        return [_told(each) for each in self.responses(message)]


class ServerWire(Wire):
    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.close = self._channel.close

    def send(self, procedure: str, message: Any) -> Answer:
        try:
            return Answer("OK", "", getattr(self._stub, procedure)(message, timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            return Answer(error.code().name, error.details())

    def responses(self, message: Any) -> list[Answer]:
        answers = self._stub.ModelStreamInfer(iter([message]), timeout=_TIMEOUT_S)
        return [Answer("", each.error_message, each.infer_response) for each in answers]


class HarnessWire(Wire):
    def __init__(self, harness: ModelHarness) -> None:
        self._transport = harness.connect()
        self.close = self._transport.close

    def send(self, procedure: str, message: Any) -> Answer:
        try:
            return Answer("OK", "", self._transport.send(GrpcMessage(procedure, message), _TIMEOUT_S))
        except InferenceError as error:
            return Answer(str(error.status()).removeprefix("StatusCode."), str(error.message()))

    def responses(self, message: Any) -> list[Answer]:
        found = list[Answer]()
        try:
            for response in self._transport.stream(GrpcMessage("ModelStreamInfer", message), _TIMEOUT_S):
                found.append(Answer("", "", response))
        except InferenceError as error:
            found.append(Answer("", str(error.message()), service_pb2.ModelInferResponse()))
        return found


def request(
    model: str,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, **more)
    for name, (datatype, shape, content) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        setattr(message.parameters[name], _FIELDS[type(value)], value)
    return message
