"""Requests that name a slot: what is served, where outputs lie, and how much of this package's code it takes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import ModelError, RequestRefusedError, VersionError
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.spans import InputSpan
from shm_backend_utils.tensors.attributes import MemoryType
from shm_backend_utils.testing import emulator
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, log_lines, message_of, outputs_of
from tests.unit.sessions import double, session_of, tensor
from tests.unit.table_client import Client

SLOTS = 2
MOST_FUNCTIONS = 20
PACKAGE = f"{os.sep}shm_backend_utils{os.sep}"
EMULATOR = str(Path(emulator.__file__).parent)
X = np.arange(4, dtype=np.float32)
Infer = Callable[[Call], object]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    inputs = [tensor("X"), tensor("W"), tensor("TEXT", "STRING")]
    outputs = [tensor("Y"), tensor("Z"), tensor("WORDS", "STRING"), tensor("N", "INT64")]
    with session_of(monkeypatch, inputs, outputs) as session:
        yield session


def served(session: ShmSession, request: InferenceRequest, infer: Infer) -> Any:
    (response,) = session.serve([request], infer)
    return response


# Where tensors are


def test_an_input_is_the_clients_memory_and_read_only(session: ShmSession, client: Client) -> None:
    seen: list[Any] = []

    def infer(call: Call) -> None:
        view = call.input("X")
        client.region.data()[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)
        seen.extend([view.path, view.shape, view.triton_dtype, view.writable, view.numpy().tolist(), call.path])
        seen.append(view.attributes.memory_type)
        call.output("Y", (0,), np.float32)

    assert served(session, client.request({"X": X}, {"Y": 16}), infer).error() is None
    assert seen == ["direct", (4,), "FP32", False, [7, 1, 2, 3], "direct", MemoryType.CPU]


def test_the_inputs_are_those_that_the_request_has_in_the_order_of_the_configuration(
    session: ShmSession, client: Client
) -> None:
    found: list[Any] = []

    def infer(call: Call) -> None:
        found.extend((name, view.path, view.numpy().tolist()) for name, view in call.inputs.items())
        found.append(call.find_input("TEXT"))
        double(call)

    request = client.request({"W": X + 1}, {"Y": 16}, delivered={"X": X})
    assert served(session, request, infer).error() is None
    assert found == [("X", "triton", X.tolist()), ("W", "direct", (X + 1).tolist()), None]


def test_an_output_is_where_the_table_has_room_for_it(session: ShmSession, client: Client) -> None:
    response = served(session, client.request({"X": X}, {"Y": 16}), double)
    assert (response.error(), outputs_of(response)) == (None, {})
    place = client.places()["Y"]
    assert (place.region, place.offset, place.byte_size) == (0, client.data + 256, 16)
    assert client.output("Y").tolist() == [0, 2, 4, 6]
    assert client.is_over()


def test_an_output_that_finds_no_room_is_in_the_response(session: ShmSession, client: Client) -> None:
    response = served(session, client.request({"X": X}, {"Y": 15}), double)
    assert outputs_of(response)["Y"].tolist() == [0, 2, 4, 6]
    place = client.places()["Y"]
    assert (place.is_in_response, place.shape, place.dtype.name) == (True, (4,), "FP32")
    parameters = client.begin(client.laid_out({"X": X}, {}))  # which lists none
    assert outputs_of(served(session, delivered(parameters, ["Y"]), double))["Y"].tolist() == [0, 2, 4, 6]
    response = served(session, client.request({}, {"WORDS": 4}), lambda call: call.put("WORDS", ["ab", "c"]))
    assert outputs_of(response)["WORDS"].tobytes() == b"\x02\0\0\0ab\x01\0\0\0c"
    assert client.places()["WORDS"].shape == (2,)


def test_strings_lie_in_the_clients_memory_both_ways(session: ShmSession, client: Client) -> None:
    encoded = b"\x01\0\0\0a\x02\0\0\0bc"
    said = client.laid_out({}, {"WORDS": 64})
    client.region.data()[512 : 512 + len(encoded)] = np.frombuffer(encoded, np.uint8)
    said.inputs["TEXT"] = InputSpan(BYTES, (2,), 0, client.data + 512, 30)
    seen: list[bytes] = []

    def infer(call: Call) -> None:
        seen.extend(call.input("TEXT").strings())
        call.put("WORDS", [word.upper() for word in seen])

    response = served(session, delivered(client.begin(said), ["WORDS"]), infer)
    assert response.error() is None
    place = client.places()["WORDS"]
    assert (seen, place.byte_size, place.shape) == ([b"a", b"bc"], 11, (2,))
    at = place.offset
    assert client.region.bytes()[at : at + 11].tobytes() == encoded.upper()


def test_parameters_are_the_users_own_and_a_copy(session: ShmSession, client: Client) -> None:
    seen: list[Any] = []

    def infer(call: Call) -> None:
        call.parameters.clear()
        seen.append(call.parameters)
        call.put("Y", X)

    served(session, client.request({}, {"Y": 16}, shm_callers="a", note="b", count=3), infer)
    assert seen == [{"note": "b", "count": 3}]


# Shapes


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, int])
def test_shapes_may_be_integers_of_numpy(session: ShmSession, client: Client, kind: Any) -> None:
    def infer(call: Call) -> None:
        call.output("Y", [kind(4)], np.float32).numpy()[:] = 5

    for _ in range(3):
        response = served(session, client.request({}, {"Y": 16}), infer)
        assert response.error() is None
        assert client.output("Y").tolist() == [5, 5, 5, 5]
        assert {type(size) for size in client.places()["Y"].shape} == {int}


def test_shapes_parameters_and_outputs_without_room_leave_nothing_behind(session: ShmSession, client: Client) -> None:
    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for length in range(1, 20):
        served(session, client.request({"X": np.ones(length, np.float32)}, {"Y": 4 * length}), double)
    before = objects()
    for length in range(20, 220):
        array = np.full(length, length, np.float32)
        room = 4 * length if length % 4 else 16  # too little, at times
        response = served(session, client.request({"X": array}, {"Y": room}, note="x" * length), double)
        found = client.output("Y") if length % 4 else outputs_of(response)["Y"]
        assert found.tolist() == [2 * length] * length
    del response, found
    assert objects() - before < 50
    for count in range(60):
        if count == 10:
            resident_before = resident()
        prompt = chr(97 + count % 26) * (1 << 20) + str(count)
        served(session, client.request({"X": X}, {"Y": 16}, prompt=prompt), double)
    assert resident() - resident_before < 16 << 20


# The way of a request


def functions_of(work: Callable[[], object]) -> list[str]:
    """Return the functions of this package that are called, but for those that stand for Triton's."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and PACKAGE in file and not file.startswith(EMULATOR):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_warm_request_takes_few_functions_of_whatever_shape(session: ShmSession, client: Client) -> None:
    def found(length: int, slot: int = 0) -> list[str]:
        request = client.request({"X": np.ones(length, np.float32)}, {"Y": 4 * length}, slot)
        return functions_of(lambda: session.serve([request], double))

    found(4)
    for length in (8, 5):
        assert len(found(length)) <= MOST_FUNCTIONS, found(length)
    assert len(found(77, 1)) < len(found(4)) + 40  # the second slot's address is read once


# Errors


def test_what_infer_raises_fails_the_request_and_is_logged(session: ShmSession, client: Client) -> None:
    def infer(call: Call) -> None:
        raise ValueError("not today")

    response = served(session, client.request({"X": X}, {"Y": 16}), infer)
    assert (error_code(response), message_of(response)) == ("INTERNAL", "ValueError: not today")
    assert "Traceback" in log_lines()[-1]
    assert client.is_over()
    assert not client.has_results()


STATUSES = [
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "UNKNOWN",
    "INTERNAL",
]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("direct", [True, False])
def test_a_model_refuses_in_its_own_words_by_a_status_of_its_own(
    session: ShmSession, client: Client, status: str, direct: bool
) -> None:
    kind = sys.modules["triton_python_backend_utils"].TritonError
    for error in (RequestRefusedError("not today", status), OSError(kind("not today", getattr(kind, status)))):

        def infer(call: Call, error: Exception = error) -> None:
            raise error

        response = served(session, client.request({"X": X}, {"Y": 16}) if direct else delivered({}, ["Y"]), infer)
        assert (error_code(response), message_of(response)) == (status, "not today")
    assert RequestRefusedError("no").status == "INVALID_ARG"
    with pytest.raises(ModelError, match="expected one of UNKNOWN, .*did you mean 'NOT_FOUND'"):
        RequestRefusedError("no", "NOTFOUND")


def test_an_output_that_is_missing_is_the_models_error_and_an_input_the_callers(
    session: ShmSession, client: Client
) -> None:
    response = served(session, client.request({"X": X}, {"Y": 16, "Z": 16}), double)
    assert message_of(response).startswith("shm:model: output 'Z' was requested, but model.py wrote none; write it by ")
    assert client.is_over()
    response = served(session, client.request({}, {"Y": 16}), double)
    assert error_code(response) == "INVALID_ARG"
    assert message_of(response) == "shm:missing: the request has no input 'X', which the model needs"


def test_a_closed_session_answers_that_it_is(session: ShmSession, client: Client) -> None:
    session.close()
    response = served(session, client.request({"X": X}, {"Y": 16}), double)
    assert (error_code(response), message_of(response)[:10]) == ("UNAVAILABLE", "shm:closed")


def test_a_session_can_be_used_without_serve(session: ShmSession, client: Client) -> None:
    with session.open(client.request({"X": X}, {"Y": 16})) as call:
        double(call)
    assert call.response.error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]
    failing = session.open(client.request({"X": X}, {"Y": 16}))
    with pytest.raises(RuntimeError, match="not today"), failing:
        raise RuntimeError("not today")
    assert message_of(failing.response) == "RuntimeError: not today"
    assert client.is_over()
    refused = session.open(delivered({"shm_slot": "1/m", "shm_generation": 1}, ["Y"]))
    with pytest.raises(VersionError), refused:
        pass
    assert message_of(refused.response).startswith("shm:version: ")
