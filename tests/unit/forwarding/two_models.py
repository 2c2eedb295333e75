"""Two sessions in the test's process, of which the first can call the second, as the Python backend would."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.forward import model_specs
from shm_backend_utils.testing import fake_backend
from shm_backend_utils.testing.fake_backend import Request, Response, Tensor
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)
Infer = Callable[[Call], Any]


class BlsResponse:
    """What a model gets that calls another one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.failure: object = None

    def has_error(self) -> bool:
        return self.failure is not None

    def error(self) -> BlsResponse:
        return self

    def message(self) -> str:
        return str(self.failure)

    def output_tensors(self) -> list[Tensor]:
        return [Tensor(name, content) for name, content in self.tensors.items()]


class Models:
    """The caller's session, and what the other model does with the requests it gets.

    Attributes
    ----------
    caller, other : ShmSession
    answer : callable
        What the other model does with a call; None if it answers without looking at the request.
    change : callable
        Takes each response of the other model, and what it likes to change there.
    gate : asyncio.Event or None
        What an asynchronous call waits for.
    """

    def __init__(self) -> None:
        self.caller: ShmSession
        self.other: ShmSession
        self.answer: Infer | None = double
        self.change: Callable[[BlsResponse], None] = lambda response: None
        self.gate: asyncio.Event | None = None

    def execute(self, request: Request) -> BlsResponse:
        made = BlsResponse()
        if self.answer is not None:
            (response,) = self.other.serve([request], self.answer)
            made.tensors, made.failure = dict(response.tensors), response.error
        self.change(made)
        return made

    def serve(self, client: Client, infer: Infer, x: Any = X, room: int = 16) -> Response:
        """Have the caller serve a request of X, with room for Y."""
        (response,) = self.caller.serve([client.request({"X": x}, {"Y": room})], infer)
        assert isinstance(response, Response)
        return response

    def refused(self, client: Client, infer: Infer) -> str:
        """Return the error of a request of the caller."""
        response = self.serve(client, infer)
        assert client.is_over()
        return str(response.error)


def double(call: Call) -> None:
    x = call.input("X")
    np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())


def config(name: str, paths: str = "direct", **more: Any) -> dict[str, Any]:
    parameters = {"SHM_PATHS": {"string_value": paths}} if paths else {}
    return {"name": name, "input": [tensor("X")], "output": [tensor("Y")], "parameters": parameters, **more}


@contextmanager
def two_models(monkeypatch: pytest.MonkeyPatch, other: Mapping[str, Any] | None) -> Iterator[Models]:
    """Make the models ``m``, which calls, and ``other``; the server tells of the configuration, if there is one."""
    models = Models()
    told = {"other": other}

    class InferenceRequest:
        def __init__(
            self,
            model_name: str,
            model_version: int,
            inputs: Sequence[Tensor],
            requested_output_names: Sequence[str],
            parameters: Mapping[str, Any],
        ) -> None:
            if not all(isinstance(value, str | int) for value in parameters.values()):
                raise ValueError("Expect parameters values to have type bool/int/str")  # so says Triton 2.51
            delivered = {each.name(): each.content for each in inputs}
            self._request = Request(parameters, requested_output_names, delivered)

        def exec(self) -> BlsResponse:
            return models.execute(self._request)

        async def async_exec(self) -> BlsResponse:
            if models.gate is not None:
                await models.gate.wait()
            return models.execute(self._request)

    def fetch_json(url: str, timeout_s: float) -> Any:
        found = told[url.split("/")[-2]]
        if found is None:
            raise OSError("nobody answers")
        return found

    module = fake_backend.module()
    vars(module).update(InferenceRequest=InferenceRequest)
    monkeypatch.setitem(sys.modules, fake_backend.NAME, module)
    monkeypatch.setattr(model_specs, "fetch_json", fetch_json)
    models.caller = ShmSession.from_args({"model_config": json.dumps(config("m", ""))})
    models.other = ShmSession.from_args({"model_config": json.dumps(other or config("other", ""))})
    try:
        yield models
    finally:
        models.caller.close()
        models.other.close()
