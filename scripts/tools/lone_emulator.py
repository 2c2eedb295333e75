"""A stub with no other model around it: what it logs, and what requests are answered with, is kept to be read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NoReturn

import numpy.typing as npt

from shm_backend_utils.dtypes import from_numpy
from shm_backend_utils.testing.emulator.delivery import Delivery, deliver
from shm_backend_utils.testing.emulator.metrics import MetricsRegistry
from shm_backend_utils.testing.emulator.module import backend_module
from shm_backend_utils.testing.emulator.pybind import TritonModelException
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse


class KeptAnswers:
    def __init__(self) -> None:
        self.sent: list[InferenceResponse | None] = []  # none for an end without a response
        self.is_over = False  # whether the last of them was sent
        self.is_given_up = False  # whether the client has given the request up; to be set

    def send(self, response: InferenceResponse | None, *, is_final: bool) -> None:
        self.is_over = is_final
        self.sent.append(response)


class LoneServer:
    def __init__(self) -> None:
        self.metrics = MetricsRegistry()  # the metric families of the server
        self.lines: list[str] = []  # what was logged, which goes to standard error as well
        self.backend: ModuleType = backend_module(self)  # what the stub imports as ``triton_python_backend_utils``

    def is_executing(self) -> bool:
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TritonModelException("this server has no other model")

    stream = load_model = unload_model = is_model_ready = _refuse

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        self._refuse()

    def cancel(self, request: InferenceRequest) -> None:
        """Do nothing: no stream has begun."""

    def model_dir(self) -> str:
        return ""

    def instance_name(self) -> str:
        return "m_0_0"

    def log(self, level: str, message: str) -> None:
        self.lines.append(message)
        print(message, file=sys.stderr, flush=True)


def deliver_alone(
    backend: ModuleType,
    parameters: Mapping[str, Any],
    outputs: Iterable[str],
    inputs: Mapping[str, npt.NDArray[Any]],
    answers: KeptAnswers,
) -> InferenceRequest:
    """Return a request to a model ``m``, maybe a decoupled one, as a stub gets it."""
    contents = [(name, from_numpy(array.dtype, name).name, array) for name, array in inputs.items()]
    return deliver(
        backend,
        Delivery(contents, outputs, parameters, "7"),
        model_name="m",
        model_version=1,
        is_decoupled=True,
        sink=answers,
        is_cancelled=lambda: answers.is_given_up,
    )
