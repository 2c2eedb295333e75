"""Requests of plain clients, which the same code serves; and requests that ask for what they may not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, MissingTensorError, TensorNameError
from shm_backend_utils.model import Call
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.emulated import delivered, message_of, outputs_of
from tests.unit.modes.doubling import Open, X
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client


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


DESCRIPTOR = {"v": 1, "model": "m", "regions": [], "inputs": {}, "outputs": {}}


def error_of(open_session: Open, request: InferenceRequest, **more: Any) -> str:
    (response,) = open_session(**more).serve([request], double)
    return message_of(response)


@pytest.mark.parametrize("generation", [0, -1, None, "1", 1.0, True])
def test_a_generation_that_is_none_is_refused(open_session: Open, client: Client, generation: Any) -> None:
    request = client.request({"X": X}, {"Y": 16}, shm_generation=generation)
    assert error_of(open_session, request).startswith("shm:table: shm_generation: found")
    assert client.is_free()


def test_a_descriptor_for_another_model_leaves_the_delivered_tensors(open_session: Open) -> None:
    said = {"shm_io": json.dumps({**DESCRIPTOR, "model": "another"})}
    (response,) = open_session().serve([delivered(said, ["Y"], {"X": X})], double)
    assert outputs_of(response)["Y"].tolist() == (X * 2).tolist()
    assert "speaks to another model" in error_of(open_session, delivered(said, ["Y"]))


def test_a_descriptor_for_another_model_leaves_the_slots_tensors(open_session: Open, client: Client) -> None:
    said = json.dumps({**DESCRIPTOR, "model": "another"})
    assert error_of(open_session, client.request({"X": X}, {"Y": 16}, shm_io=said)) == ""
    assert client.output("Y").tolist() == (X * 2).tolist()


def test_a_delivered_tensor_that_the_configuration_does_not_have_is_no_input(open_session: Open) -> None:
    def infer(call: Call) -> None:
        with pytest.raises(TensorNameError, match="'Z'"):
            call.input("Z")
        double(call)

    (response,) = open_session().serve([delivered({}, ["Y"], {"X": X, "Z": X})], infer)
    assert response.error() is None


@pytest.mark.parametrize("name", ["shm_io", "shm_slot"])
def test_a_model_that_does_not_serve_the_path_takes_no_memory(open_session: Open, client: Client, name: str) -> None:
    request = client.request({"X": X}, {"Y": 16})
    if name == "shm_io":
        request = delivered({"shm_io": json.dumps(DESCRIPTOR)}, ["Y"], {"X": X})
    assert f"{name}: found something, expected nothing" in error_of(
        open_session, request, parameters={"SHM_PATHS": "triton-shm"}
    )


def test_a_descriptor_beside_a_slot_is_refused(open_session: Open, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16}, shm_io=json.dumps(DESCRIPTOR))
    assert "found a descriptor beside shm_slot" in error_of(open_session, request)
    assert client.is_free()


def test_rows_are_compared_with_the_carrier_where_there_are_batches_alone(open_session: Open, client: Client) -> None:
    assert error_of(open_session, client.request({"X": X}, {"Y": 16})) == ""
    batched = {"inputs": [tensor("X"), tensor("SHM", "UINT8")], "max_batch_size": 4}
    x = np.ones((2, 2), np.float32)
    for rows, error in ((None, "the request has none"), (3, "the request has one of 3"), (2, "")):
        delivered = {} if rows is None else {"SHM": np.empty((rows, 0), np.uint8)}
        request = client.request({"X": x}, {"Y": 16}, delivered=delivered)
        found = error_of(open_session, request, **batched)
        assert error in found
        assert bool(error) == bool(found)


def test_a_call_that_is_over_gives_nothing(open_session: Open, client: Client) -> None:
    calls: list[Call] = []

    def infer(call: Call) -> None:
        with pytest.raises(MissingTensorError):
            call.input("Z")
        assert call.find_input("Z") is None
        calls.append(call)
        double(call)

    inputs = [tensor("X"), tensor("Z")]
    open_session(inputs).serve([client.request({"X": X}, {"Y": 16})], infer)
    (call,) = calls
    for use in (
        lambda: call.input("X"),
        lambda: call.find_input("X"),
        lambda: call.find_input("Z"),
        lambda: call.inputs,
        lambda: call.output("Y", (4,), np.float32),
        lambda: call.put("Y", X),
        lambda: call.forward("m", {}),
        lambda: call.ready_on(1),
        lambda: call.response_parameters,
    ):
        with pytest.raises(ClosedError, match="this call"):
            use()


# Further regions
