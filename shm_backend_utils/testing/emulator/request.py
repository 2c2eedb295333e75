"""A request: one that a model executes, or one that it makes for another model, with the responses to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from .host import Host
from .pybind import (
    NumberedEnum,
    StubDiesError,
    TritonError,
    TritonModelException,
    refuse,
    signed,
    text,
    texts,
    truth,
    unsigned,
)
from .response import InferenceResponse, InferenceResponseSender, to_json
from .tensor import Tensor, tensors_in

__all__ = ["InferenceRequest", "InferenceTrace", "MemoryType", "PreferredMemory", "ResponseIterator"]

_INIT: Final = "InferenceRequest"
_RELEASE_ALL: Final = 1


class MemoryType(NumberedEnum):
    """Where outputs of another model should lie."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where outputs of another model should lie: memory of the CPU, or of which GPU. From Triton 23.04 on."""

    __slots__ = ("_device", "_kind")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            refuse("PreferredMemory", "preferred_memory_type", preferred_memory_type, "a MemoryType")
        self._kind: MemoryType | None = preferred_memory_type
        self._device = signed("PreferredMemory", "preferred_device_id", preferred_device_id, 64)

    @classmethod
    def _unsaid(cls) -> PreferredMemory:
        """Return the default of a request without a preference."""
        made = cls.__new__(cls)
        made._kind = None
        made._device = 0
        return made


class InferenceTrace:
    """The trace of a request, to be handed to requests for other models, from Triton 23.08 on; here none is traced."""

    __slots__ = ()

    def get_context(self) -> str | None:
        """Return the context of an OpenTelemetry trace as JSON, if there is one; from Triton 24.03 on."""
        return None


class ResponseIterator:
    """The responses to a request that a model made, as they come; once all are there, you can iterate again."""

    __slots__ = ("__weakref__", "_coming", "_have", "_is_finished", "_next", "_request")

    def __init__(self, response: InferenceResponse) -> None:
        self._have = [response]
        self._next = 0
        self._coming: Iterator[tuple[InferenceResponse, bool]] = iter(())
        self._is_finished = True
        self._request: InferenceRequest | None = None

    @classmethod
    def _of(cls, coming: Iterator[tuple[InferenceResponse, bool]], request: InferenceRequest) -> ResponseIterator:
        """Wait for the first response, and return an iterator; ``coming`` has with each whether it is the last."""
        response, is_last = next(coming)
        made = cls(response)
        made._coming = coming
        made._is_finished = is_last
        made._request = request
        return made

    def __iter__(self) -> ResponseIterator:
        if self._is_finished and self._next >= len(self._have):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next == len(self._have) and not self._is_finished:
            response, self._is_finished = next(self._coming)
            self._have.append(response)
        if self._next == len(self._have):
            raise StopIteration("Iteration is done for the responses.")
        self._next += 1
        return self._have[self._next - 1]

    def cancel(self) -> None:
        """Cancel the request; from Triton 25.04 on."""
        if not self._is_finished and self._request is not None:
            self._request._host.cancel(self._request)


class InferenceRequest:
    """A request: one that a model executes, or one that it makes for another model.

    ``correlation_id`` may be a str from Triton 24.04 on, ``preferred_memory`` is there from 23.04 on, ``trace`` from
    23.08 on, and ``parameters`` from 23.11 on. ``timeout`` is in microseconds, 0 for none.
    """

    __slots__ = (
        "__weakref__",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_is_cancelled",
        "_is_delivered",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_sender",
        "_timeout",
        "_trace",
    )

    _host: Host

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = PreferredMemory._unsaid(),  # noqa: B008  # it cannot be changed
        trace: InferenceTrace = InferenceTrace(),  # noqa: B008  # nor can it
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(preferred_memory, PreferredMemory):
            refuse(_INIT, "preferred_memory", preferred_memory, "a PreferredMemory")
        if not isinstance(trace, InferenceTrace):
            refuse(_INIT, "trace", trace, "an InferenceTrace")
        self._request_id = text(_INIT, "request_id", request_id)
        self._inputs = tensors_in(_INIT, "inputs", inputs)
        self._requested_output_names = set(texts(_INIT, "requested_output_names", requested_output_names))
        self._model_name = text(_INIT, "model_name", model_name)
        self._model_version = signed(_INIT, "model_version", model_version, 64)
        self._flags = unsigned(_INIT, "flags", flags, 32)
        self._timeout = unsigned(_INIT, "timeout", timeout, 64)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = to_json(parameters)
        self._correlation_id = _correlation_id(correlation_id)
        self._release_flags = _RELEASE_ALL
        self._is_cancelled: Callable[[], bool] = _is_never
        self._is_delivered = False
        whose = f"for request with id '{self._request_id}' and model name '{self._model_name}' should not be empty."
        if None in self._inputs:
            raise TritonModelException(f"Input tensor {whose}")
        if "" in self._requested_output_names:
            raise TritonModelException(f"Requested output name {whose}")
        self._sender = InferenceResponseSender(self._requested_output_names)

    def inputs(self) -> list[Tensor]:
        """Return the inputs, in a list of the caller's own."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the client's name for it; empty if it gave none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the sequence that it belongs to, as the client names it; 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the flags for its place in its sequence."""
        return self._flags

    def set_flags(self, flags: int, /) -> None:
        """Set the flags for its place in its sequence."""
        self._flags = unsigned("set_flags", "flags", flags, 32)

    def timeout(self) -> int:
        """Return the client's timeout in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON, in any order; from Triton 23.03 on."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        """Return the trace, of which requests to other models can be a part."""
        return self._trace

    def requested_output_names(self) -> set[str]:
        """Return the outputs that the client wants."""
        return set(self._requested_output_names)

    def get_response_sender(self) -> InferenceResponseSender:
        """Return its response sender."""
        return self._sender

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled it; from Triton 23.10 on."""
        if not self._is_delivered:
            raise StubDiesError("is_cancelled of a request that no client has sent: a real server dies of it")
        return self._is_cancelled()

    def set_release_flags(self, flags: int, /) -> None:
        """Choose whether it is released after ``execute``, or scheduled again; from Triton 23.11 on."""
        found = unsigned("set_release_flags", "flags", flags, 32)
        if not self._is_delivered:
            raise StubDiesError("set_release_flags of a request that no client has sent: a real stub dies of it")
        self._release_flags = found

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Let the model execute it, and wait for its response, or error; with ``decoupled``, for the first."""
        truth("exec", "decoupled", decoupled)
        host = self._host
        if not host.is_executing():
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        try:
            for tensor in self._inputs:
                tensor._save()
            if decoupled:
                return ResponseIterator._of(host.stream(self), self)
            return host.infer(self)
        except TritonModelException as error:
            text = f"Model {self._model_name} - Error when running inference: {error}"
            response = InferenceResponse([], TritonError(text))
            return ResponseIterator(response) if decoupled else response

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[InferenceResponse | ResponseIterator]:
        """Like :meth:`exec`, but in a thread, while the event loop goes on; RuntimeError if none is running."""
        truth("async_exec", "decoupled", decoupled)
        return asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)


def _is_never() -> bool:
    return False


def _correlation_id(value: object) -> int | str:
    if value is None:
        refuse(_INIT, "correlation_id", value, "an int or a str")
    if isinstance(value, int):
        if not 0 <= value < 1 << 64:
            raise RuntimeError("Unable to cast Python instance to C++ type: a correlation id is an int of 64 bits")
        return value
    if isinstance(value, str):
        return value
    raise TritonModelException("Correlation ID must be integer or string")
