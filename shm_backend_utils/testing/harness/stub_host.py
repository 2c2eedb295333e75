"""What a stub asks of its server, for the model that it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from ..emulator import MetricsRegistry, TensorContent, deliver_response, sent_inputs
from ..emulator.errors import ErrorCode, TritonError
from .requests import Outcome

__all__ = ["ModelCall", "ServerCalls", "StubHost"]


class ModelCall(NamedTuple):
    """A request that one model makes of another; it can be pickled."""

    model: str
    version: str  # empty if the server chooses
    request_id: str
    correlation_id: int | str
    inputs: list[TensorContent]
    outputs: tuple[str, ...]
    parameters: dict[str, Any]
    flags: int
    timeout_us: int
    takes_many: bool  # a decoupled model may answer


class ServerCalls(Protocol):
    """What the server does for a stub. What it refuses is a ``TritonModelException`` with its words."""

    @property
    def metrics(self) -> MetricsRegistry:
        """The metric families that models have made."""

    def call_model(self, call: ModelCall) -> Iterator[Outcome]:
        """Have another model execute a request, and return its responses as they come."""

    def log(self, level: str, message: str) -> None:
        """Write to the server's log."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model."""

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        """Unload a model."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model can execute requests."""


class StubHost:
    """The host of one emulated stub.

    ``is_executing`` returns whether the model is past ``initialize`` and not yet in ``finalize``; ``instance_name``
    what the server calls the instance.
    """

    backend: ModuleType

    def __init__(
        self,
        calls: ServerCalls,
        folder: Path,
        is_executing: Callable[[], bool],
        instance_name: Callable[[], str],
    ) -> None:
        self._folder = folder
        self.is_executing = is_executing
        self.instance_name = instance_name
        self._calls = calls
        self.log = calls.log
        self.load_model = calls.load_model
        self.unload_model = calls.unload_model
        self.is_model_ready = calls.is_model_ready

    @property
    def metrics(self) -> MetricsRegistry:
        """The metric families that models have made."""
        return self._calls.metrics

    def model_dir(self) -> str:
        """Return the folder of the model's version."""
        return str(self._folder)

    def infer(self, request: Any) -> Any:
        """Have another model execute a request, and return its one response."""
        found: Outcome | None = None
        for outcome in self._calls.call_model(_call(request, takes_many=False)):
            if found is None or not outcome.is_empty:
                found = outcome
        assert found is not None  # there is a last one
        return self._response(found)

    def stream(self, request: Any) -> Iterator[tuple[Any, bool]]:
        """Return the responses to a request, each with whether it is the last."""
        for outcome in self._calls.call_model(_call(request, takes_many=True)):
            yield self._response(outcome), outcome.is_final

    def cancel(self, request: Any) -> None:
        """Take no notice, and the other model goes on: a real one may look whether it is cancelled."""

    def _response(self, outcome: Outcome) -> Any:
        if outcome.error is not None:
            message, code = outcome.error
            return deliver_response(self.backend, [], TritonError(message, ErrorCode[code]))
        return deliver_response(self.backend, outcome.outputs)


def _call(request: Any, *, takes_many: bool) -> ModelCall:
    version = request._model_version
    return ModelCall(
        request._model_name,
        "" if version == -1 else str(version),
        request.request_id(),
        request.correlation_id(),
        sent_inputs(request),
        tuple(request.requested_output_names()),
        json.loads(request.parameters() or "{}"),
        request.flags(),
        request.timeout(),
        takes_many,
    )
