"""A model's answer to one request, and the rules of sending it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .pybind import StubDiesError, TritonError, TritonModelException, refuse, unsigned
from .tensor import Tensor, tensors_in

if TYPE_CHECKING:
    from .host import ResponseSink

__all__ = ["FINAL", "InferenceResponse", "InferenceResponseSender", "to_json"]

FINAL: Final = 1
"""The flag of the last response."""


def to_json(parameters: Mapping[str, Any] | None) -> str:
    """Return parameters as the stub writes them; TritonModelException if they cannot travel."""
    if parameters is None:
        return "{}"
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, str | int):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return json.dumps(parameters)


class InferenceResponse:
    """A model's answer to one request: outputs, or an error; with parameters from Triton 25.02 on."""

    __slots__ = ("__weakref__", "_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        tensors = tensors_in("InferenceResponse", "output_tensors", output_tensors)
        if None in tensors:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        if error is not None and not isinstance(error, TritonError):
            refuse("InferenceResponse", "error", error, "a TritonError")
        self._tensors = tensors
        self._error = error
        self._parameters = to_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs, in a list of the caller's own."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Return whether this is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON; from Triton 25.02 on."""
        return self._parameters

    def _keep_outputs(self, names: set[str]) -> None:
        """Drop the outputs that were not requested: sending changes the response itself."""
        self._tensors = [tensor for tensor in self._tensors if tensor.name() in names]

    def _save(self) -> None:
        """Copy the outputs into the pool, unless it is an error."""
        if self._error is None:
            for tensor in self._tensors:
                tensor._save()


class InferenceResponseSender:
    """Sends the responses to a request: any number for a decoupled model, one for others, from Triton 24.06 on."""

    __slots__ = ("__weakref__", "_is_cancelled", "_is_closed", "_is_decoupled", "_lock", "_names", "_sent", "_sink")

    def __init__(self, requested_output_names: set[str]) -> None:
        self._names = requested_output_names
        self._sink: ResponseSink | None = None
        self._is_decoupled = False
        self._is_cancelled: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._is_closed = False
        self._sent = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, with only the requested outputs; or end the stream by the flag alone."""
        if response is not None and not isinstance(response, InferenceResponse):
            refuse("send", "response", response, "an InferenceResponse or None")
        flags = unsigned("send", "flags", flags, 32)
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        sink = self._count(response, flags)
        if response is not None:
            response._keep_outputs(self._names)
            response._save()
        sink.send(response, is_final=flags == FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request."""
        if self._sink is None:
            raise StubDiesError("is_cancelled of a request that no client has sent: a real server dies of it")
        return self._is_cancelled()

    def _serve(self, sink: ResponseSink, is_cancelled: Callable[[], bool], *, is_decoupled: bool) -> None:
        self._sink = sink
        self._is_cancelled = is_cancelled
        self._is_decoupled = is_decoupled

    def _count(self, response: InferenceResponse | None, flags: int) -> ResponseSink:
        sink = self._sink
        if sink is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the model."
            )
        with self._lock:
            if not self._is_decoupled:
                if response is not None and self._sent > 0:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and self._sent == 0:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self._is_closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._is_closed = flags == FINAL
            self._sent += 1
        return sink
