"""Requests of plain clients are served by the same code as those that name a slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import Call
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.emulated import delivered, message_of, outputs_of
from tests.unit.modes.doubling import Open, X, double
from tests.unit.sessions import tensor
from tests.unit.table_client import Client


def test_a_plain_request_is_served_by_the_same_code(open_session: Open) -> None:
    paths: list[str] = []

    def infer(call: Call) -> None:
        paths.append(call.path)
        double(call)

    (response,) = open_session().serve([delivered({}, ["Y"], {"X": X})], infer)
    assert response.error() is None
    assert (outputs_of(response)["Y"].tolist(), paths) == ([0, 2, 4, 6], ["triton"])


def test_what_a_plain_request_brings_is_read_only(open_session: Open) -> None:
    flags: list[bool] = []

    def infer(call: Call) -> None:
        view = call.input("X")
        flags.extend([view.writable, view.numpy().flags.writeable, view.array.flags.writeable])
        flags.append(X.flags.writeable)
        double(call)

    open_session().serve([delivered({}, ["Y"], {"X": X})], infer)
    assert flags == [False, False, False, True]


def test_what_is_passed_on_is_not_read(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session, request = open_session(), delivered({}, ["Y"], {"X": X})
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "as_numpy", lambda tensor: pytest.fail("it was read"))
        (response,) = session.serve([request], lambda call: call.put("Y", call.input("X")))
    assert response.error() is None
    assert outputs_of(response)["Y"].tolist() == X.tolist()


def test_a_tensor_whose_type_the_configuration_does_not_tell_is_what_triton_says(open_session: Open) -> None:
    found: list[Any] = []

    def infer(call: Call) -> None:
        x = call.input("X")
        found.extend([x.triton_dtype, x.numpy().tolist()])
        double(call)

    (response,) = open_session([tensor("X", "UNHEARD_OF")]).serve([delivered({}, ["Y"], {"X": X})], infer)
    assert response.error() is None
    assert found == ["FP32", X.tolist()]


def test_strings_of_a_plain_request(open_session: Open) -> None:
    session = open_session([tensor("X", "STRING")], [tensor("Y", "STRING")])
    texts = np.array([b"a", b"bc"], object)

    def infer(call: Call) -> None:
        call.put("Y", [text.upper() for text in call.input("X").strings()])

    (response,) = session.serve([delivered({}, ["Y"], {"X": texts})], infer)
    assert outputs_of(response)["Y"].tolist() == [b"A", b"BC"]


def test_a_plain_request_asks_for_what_it_uses_alone(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    session, request = open_session(), delivered({}, ["Y"], {"X": X})
    with monkeypatch.context() as patched:
        for name, method in vars(InferenceRequest).items():
            if not name.startswith("_"):

                def watched(request: InferenceRequest, name: str = name, method: Any = method) -> Any:
                    asked.append(name)
                    return method(request)

                patched.setattr(InferenceRequest, name, watched)
        session.serve([request], double)
    assert asked == ["parameters", "inputs", "requested_output_names"]


def test_parameters_of_a_plain_request(open_session: Open) -> None:
    seen: list[Any] = []

    def infer(call: Call) -> None:
        seen.append(call.parameters)
        double(call)

    session = open_session()
    session.serve([delivered({"note": "a", "count": 2}, ["Y"], {"X": X}), delivered({}, ["Y"], {"X": X})], infer)
    assert seen == [{"note": "a", "count": 2}, {}]


def test_a_model_may_serve_the_direct_path_alone(open_session: Open) -> None:
    session = open_session(parameters={"SHM_PATHS": "direct"})
    (response,) = session.serve([delivered({}, ["Y"], {"X": X})], double)
    assert message_of(response).startswith("shm:table: shm_slot: found nothing, expected the address of a slot: ")


def test_a_model_may_not_serve_the_direct_path(open_session: Open, client: Client) -> None:
    session = open_session(parameters={"SHM_PATHS": "inline"})
    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], double)
    assert "model 'm' does not serve the direct path" in message_of(response)
