"""A stub without another model around it: what it may not ask for, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.emulator import TritonModelException
from shm_backend_utils.testing.emulator.alone import KeptAnswers, LoneServer, deliver_alone


@pytest.mark.parametrize(
    "ask",
    [
        lambda backend: backend.load_model("n"),
        lambda backend: backend.unload_model("n"),
        lambda backend: backend.is_model_ready("n"),
    ],
)
def test_there_is_no_other_model_to_ask_for(ask: Callable[[Any], object]) -> None:
    with pytest.raises(TritonModelException, match="this server has no other model$"):
        ask(LoneServer().backend)


@pytest.mark.parametrize("decoupled", [False, True])
def test_there_is_no_other_model_to_call(decoupled: bool) -> None:
    backend = LoneServer().backend
    request = backend.InferenceRequest(model_name="n", inputs=[], requested_output_names=[])
    found = request.exec(decoupled=decoupled)
    (response,) = found if decoupled else [found]
    assert response.error().message().endswith("this server has no other model")


def test_what_is_logged_is_kept_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    server = LoneServer()
    server.backend.Logger.log_warn("first")
    server.backend.Logger.log_error("second")
    assert server.lines == ["first", "second"]
    assert capsys.readouterr().err == "first\nsecond\n"


def test_what_a_request_is_answered_with_is_kept() -> None:
    backend, answers = LoneServer().backend, KeptAnswers()
    request = deliver_alone(backend, {"a": 1}, ["Y"], {"X": np.arange(2)}, answers)
    assert (request.parameters(), request.requested_output_names()) == ('{"a":1}', {"Y"})
    assert [tensor.name() for tensor in request.inputs()] == ["X"]
    sender, response = request.get_response_sender(), backend.InferenceResponse([])
    sender.send(response)
    assert (answers.sent, answers.is_over) == ([response], False)
    sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    assert (answers.sent, answers.is_over) == ([response, None], True)
    assert not request.is_cancelled()
    answers.is_given_up = True
    assert request.is_cancelled()
