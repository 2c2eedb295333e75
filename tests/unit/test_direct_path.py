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

from shm_backend_utils.errors import ModelError, RequestRefusedError, VersionError
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.testing import emulator
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of, outputs_of
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
    with session_of(monkeypatch, inputs, [tensor("Y"), tensor("Z")]) as session:
        yield session


def served(session: ShmSession, request: InferenceRequest, infer: Infer) -> Any:
    (response,) = session.serve([request], infer)
    return response


def test_inputs_come_in_the_order_of_the_configuration(session: ShmSession, client: Client) -> None:
    found: list[Any] = []

    def infer(call: Call) -> None:
        found.extend((name, view.path, view.numpy().tolist()) for name, view in call.inputs.items())
        found.append(call.find_input("TEXT"))
        double(call)

    request = client.request({"W": X + 1}, {"Y": 16}, delivered={"X": X})
    assert served(session, request, infer).error() is None
    assert found == [("X", "triton", X.tolist()), ("W", "direct", (X + 1).tolist()), None]


def test_parameters_are_the_users_own_and_a_copy(session: ShmSession, client: Client) -> None:
    seen: list[Any] = []

    def infer(call: Call) -> None:
        call.parameters.clear()
        seen.append(call.parameters)
        call.put("Y", X)

    served(session, client.request({}, {"Y": 16}, shm_callers="a", note="b", count=3), infer)
    assert seen == [{"note": "b", "count": 3}]


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


def functions_of(work: Callable[[], object]) -> list[str]:
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


CODES = ["NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "UNKNOWN", "INTERNAL"]


@pytest.mark.parametrize("status", CODES)
@pytest.mark.parametrize("direct", [True, False])
def test_a_model_refuses_in_its_own_words(session: ShmSession, client: Client, status: str, direct: bool) -> None:
    kind = sys.modules["triton_python_backend_utils"].TritonError
    for error in (RequestRefusedError("not today", status), OSError(kind("not today", getattr(kind, status)))):

        def infer(call: Call, error: Exception = error) -> None:
            raise error

        response = served(session, client.request({"X": X}, {"Y": 16}) if direct else delivered({}, ["Y"]), infer)
        assert (error_code(response), message_of(response)) == (status, "not today")
    assert RequestRefusedError("no").status == "INVALID_ARG"
    with pytest.raises(ModelError, match="expected one of UNKNOWN, .*did you mean 'NOT_FOUND'"):
        RequestRefusedError("no", "NOTFOUND")


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
