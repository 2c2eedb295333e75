"""An emulated Python backend in the test's own process, requests to it, and what they are answered with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import pytest

from scripts.tools.lone_emulator import KeptAnswers, LoneServer, deliver_alone
from shm_backend_utils.testing.emulator import NAME, TensorContent, deliver_response, sent_inputs, sent_outputs
from shm_backend_utils.testing.emulator.pybind import TritonError
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse


def start_server(monkeypatch: pytest.MonkeyPatch) -> LoneServer:
    started = LoneServer()
    monkeypatch.setitem(sys.modules, NAME, started.backend)
    return started


def emulated_server() -> LoneServer:
    found: LoneServer = sys.modules[NAME].Logger._host
    return found


def log_lines() -> list[str]:
    """Return what was logged since the server was started, or its session was made."""
    return emulated_server().lines


def delivered(
    parameters: Mapping[str, Any] | None = None,
    outputs: Iterable[str] = (),
    inputs: Mapping[str, npt.NDArray[Any]] | None = None,
) -> InferenceRequest:
    """Return a request as a stub gets it.

    It may come before a server is started: all of them have the same requests.
    """
    backend = sys.modules.get(NAME) or LoneServer().backend
    return deliver_alone(backend, parameters or {}, outputs, inputs or {}, KeptAnswers())


def answers_to(request: InferenceRequest) -> KeptAnswers:
    kept = request.get_response_sender()._sink
    assert isinstance(kept, KeptAnswers)
    return kept


def message_of(response: InferenceResponse | None) -> str:
    """Return what the client is told of an error; nothing if there is none."""
    error = None if response is None else response.error()
    return "" if error is None else error.message()


def error_of(session: Any, request: InferenceRequest, infer: Any) -> str:
    """Return what the client is told of the error that a request is answered with; nothing if there is none."""
    (response,) = session.serve([request], infer)
    return message_of(response)


def error_code(response: InferenceResponse | None) -> str:
    error = None if response is None else response.error()
    return "" if error is None else error.code().name


def arrived(request: InferenceRequest) -> InferenceRequest:
    """Return a request that a model has made as the stub of the other model gets it."""
    inputs = {each.name: each.array for each in sent_inputs(request) if each.array is not None}
    return delivered(json.loads(request.parameters()), request.requested_output_names(), inputs)


def answered(outputs: Sequence[TensorContent], message: str = "") -> InferenceResponse:
    """Return a response of another model as the stub of the one that called it gets it, which is told no error code."""
    return deliver_response(emulated_server().backend, outputs, TritonError(message) if message else None)


def outputs_of(response: InferenceResponse | None) -> dict[str, Any]:
    """Return what leaves the stub with a response: arrays, with strings as bytes objects; None for what is on a GPU."""
    assert response is not None
    return {output.name: output.array for output in sent_outputs(response)}
