"""Two sessions in the test's process, of which the first can call the second, as the Python backend would."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from scripts.tools.lone_emulator import LoneServer
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.forward import forwarder
from shm_backend_utils.testing.emulator import NAME, TensorContent, sent_outputs
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.emulated import answered, arrived, message_of
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)
Infer = Callable[[Call], Any]


class Models:
    """The caller's session, and what the other model does with the requests it gets."""

    def __init__(self) -> None:
        self.caller: ShmSession
        self.other: ShmSession
        self.answer: Infer | None = double  # None if it answers without looking at the request
        self.change: Callable[[list[TensorContent]], object] = lambda outputs: None  # those of each response
        self.gate = threading.Event()  # what each call waits for
        self.gate.set()

    def execute(self, request: InferenceRequest) -> InferenceResponse:
        outputs, message = list[TensorContent](), ""
        if self.answer is not None:
            (response,) = self.other.serve([request], self.answer)
            outputs, message = sent_outputs(response), message_of(response)
        self.change(outputs)
        return answered(outputs, message)

    def serve(self, client: Client, infer: Infer, x: Any = X, room: int = 16) -> Any:
        (response,) = self.caller.serve([client.request({"X": x}, {"Y": room})], infer)
        return response

    def refused(self, client: Client, infer: Infer) -> str:
        response = self.serve(client, infer)
        assert client.is_over()
        return message_of(response)


def config(name: str, paths: str = "direct", **more: Any) -> dict[str, Any]:
    parameters = {"SHM_PATHS": {"string_value": paths}} if paths else {}
    return {"name": name, "input": [tensor("X")], "output": [tensor("Y")], "parameters": parameters, **more}


@contextmanager
def two_models(
    monkeypatch: pytest.MonkeyPatch, other: Mapping[str, Any] | None, told_of_other: Mapping[str, Any] | None = None
) -> Iterator[Models]:
    """Make the models ``m``, which calls, and ``other``; the server tells of the configuration, if there is one.

    It may tell of another one than that of the process which answers, as after a model was loaded anew.
    """
    models = Models()
    told = {"other": told_of_other or other}

    class Server(LoneServer):
        def infer(self, request: InferenceRequest) -> InferenceResponse:
            models.gate.wait()
            return models.execute(arrived(request))

    def fetch_json(url: str, timeout_s: float) -> Any:
        found = told[url.split("/")[-2]]
        if found is None:
            raise OSError("nobody answers")
        return found

    monkeypatch.setitem(sys.modules, NAME, Server().backend)
    monkeypatch.setattr(forwarder, "fetch_json", fetch_json)
    models.caller = ShmSession.from_args({"model_config": json.dumps(config("m", ""))})
    models.other = ShmSession.from_args({"model_config": json.dumps(other or config("other", ""))})
    try:
        yield models
    finally:
        models.caller.close()
        models.other.close()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The other one serves the direct path."""
    with two_models(monkeypatch, config("other")) as models:
        yield models


@pytest.fixture
def stock_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The other one takes ordinary requests alone, and nobody tells what it is like."""
    with two_models(monkeypatch, None) as models:
        yield models
