"""Requests that name a slot, memory that another model has lent, or regions that are registered at the server."""

from __future__ import annotations

import gc
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ModelError, RequestRefusedError, StaleRequestError, VersionError
from shm_backend_utils.memory.locks import SharedLease, borrow
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.claims_of import claim_of_region
from tests.unit.emulated import delivered, error_code, error_of, message_of, outputs_of
from tests.unit.modes.conftest import FP32, MakeClient, Open, X
from tests.unit.sessions import double, say_registered, session_of, tensor
from tests.unit.table_client import Client
from tests.unit.test_sent_as_it_is_now import functions_called

SLOTS = 2
MOST_FUNCTIONS = 20
Infer = Callable[[Call], object]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    inputs = [tensor("X"), tensor("W"), tensor("TEXT", "STRING")]
    with session_of(monkeypatch, inputs, [tensor("Y"), tensor("Z")]) as session:
        yield session


def served(session: ShmSession, request: InferenceRequest, infer: Infer) -> Any:
    (response,) = session.serve([request], infer)
    return response


def test_inputs_come_in_configured_order_and_parameters_are_a_copy(session: ShmSession, client: Client) -> None:
    found: list[Any] = []

    def infer(call: Call) -> None:
        call.parameters.clear()
        found.append(call.parameters)
        found.extend((name, view.path, view.numpy().tolist()) for name, view in call.inputs.items())
        found.append(call.find_input("TEXT"))
        double(call)

    users: Any = {"note": "b", "count": 3}
    request = client.request({"W": X + 1}, {"Y": 16}, delivered={"X": X}, shm_callers="a", **users)
    assert served(session, request, infer).error() is None
    assert found == [users, ("X", "triton", X.tolist()), ("W", "direct", (X + 1).tolist()), None]


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


def test_a_warm_request_takes_few_functions_of_whatever_shape(session: ShmSession, client: Client) -> None:
    def found(length: int, slot: int = 0) -> list[str]:
        request = client.request({"X": np.ones(length, np.float32)}, {"Y": 4 * length}, slot)
        return functions_called(lambda: session.serve([request], double))

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
    forgotten = session.open(client.request({"X": X}, {"Y": 16}))
    with pytest.raises(ModelError, match="output 'Y' was requested, but model.py wrote none"), forgotten:
        pass
    assert "model.py wrote none" in message_of(forgotten.response)
    assert client.is_over()
    refused = session.open(delivered({"shm_slot": "1/m", "shm_generation": 1}, ["Y"]))
    with pytest.raises(VersionError), refused:
        pass
    assert message_of(refused.response).startswith("shm:version: ")
    session.close()
    response = served(session, client.request({"X": X}, {"Y": 16}), double)
    assert (error_code(response), message_of(response)[:10]) == ("UNAVAILABLE", "shm:closed")


@pytest.fixture
def lender(make_client: MakeClient) -> Client:
    return make_client()


def borrowing(lender: Client, client: Client, **changes: Any) -> InferenceRequest:
    at = client.data
    np.ndarray((4,), np.float32, client.region.bytes(), at)[...] = X
    said = Table(
        {"X": InputSpan(FP32, (4,), 1, at, 16)},
        {"Y": OutputSpan(1, at + 64, 16)},
        (claim_of_region(client.region, **changes),),
    )
    return delivered(lender.begin(said), ["Y"])


def test_lent_memory_is_used_and_held(open_session: Open, lender: Client, client: Client) -> None:
    held: list[bool] = []

    def infer(call: Call) -> None:
        held.append(client.is_free())
        double(call)

    assert error_of(open_session(), borrowing(lender, client), infer) == ""
    assert (held, client.is_free(), client.region.record(0).completed) == ([False], True, 0)
    place = lender.places(byte_sizes=[client.region.header.byte_size])["Y"]
    assert (place.region, place.offset) == (1, client.data + 64)
    assert lender.is_over()


def test_memory_that_the_client_takes_back_is_not_borrowed(open_session: Open, lender: Client, client: Client) -> None:
    assert client.region.lease(0).take_back()
    found = error_of(open_session(), borrowing(lender, client), double)
    assert found.startswith("shm:stale: the client takes back the memory")
    assert lender.is_free()
    assert lender.region.record(0).started == 0
    client.region.lease(0).give_back()


def test_other_lent_memory_fails_and_records_are_no_data(open_session: Open, lender: Client, client: Client) -> None:
    for changes in ({"slot": 2}, {"byte_size": 100_000_000}, {"byte_size": 8192}):
        assert error_of(open_session(), borrowing(lender, client, **changes), double).startswith("shm:table: ")
        assert (lender.is_free(), client.is_free()) == (True, True)
    said = Table({"X": InputSpan(FP32, (4,), 1, 4096, 16)}, {}, (claim_of_region(client.region),))
    found = error_of(open_session(), delivered(lender.begin(said), ["Y"]), double)
    assert found.startswith("shm:table: inputs.X: found 16 bytes at offset 4096")


def before_borrowing(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> list[bool]:
    borrowed: list[bool] = []

    def borrow_late(fd: int, record: int) -> SharedLease | None:
        happen()
        lease = borrow(fd, record)
        borrowed.append(lease is not None)
        return lease

    monkeypatch.setattr(policy, "borrow", borrow_late)
    return borrowed


def test_taken_back_midway(open_session: Open, monkeypatch: pytest.MonkeyPatch, lender: Client, client: Client) -> None:
    def give_up() -> None:
        assert not lender.is_free()  # the request has the lease of its slot: it was taken in
        lender.region.record(0).generation = 2

    borrowed = before_borrowing(monkeypatch, give_up)
    executed: list[Call] = []

    def infer(call: Call) -> None:
        executed.append(call)
        double(call)

    response = served(open_session(), borrowing(lender, client), infer)
    assert (borrowed, executed) == ([True], [])
    assert (error_code(response), message_of(response).partition(": ")[0]) == ("CANCELLED", "shm:stale")
    assert lender.region.record(0).started == 0
    assert lender.is_free()
    assert client.is_free()


def test_a_dying_lender(open_session: Open, monkeypatch: pytest.MonkeyPatch, lender: Client, client: Client) -> None:
    def die() -> None:
        lender.region.segment.unlink()
        lender.region.close()

    before_borrowing(monkeypatch, die)
    with pytest.raises(StaleRequestError, match="is gone"), open_session().open(borrowing(lender, client)):
        pass
    assert client.is_free()


SHM = Path("/dev/shm")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Registration]]:
    found: dict[str, Registration] = {}
    say_registered(monkeypatch, lambda: found)
    yield found
    for registration in found.values():
        (SHM / registration.key).unlink(missing_ok=True)


def file_of() -> str:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    (SHM / key).write_bytes(bytes(4096))
    return key


def descriptor(inputs: Any, outputs: Any, names: Sequence[str]) -> dict[str, str]:
    regions = [{"kind": "named", "name": name} for name in names]
    return {"shm_io": json.dumps({"v": 1, "model": "m", "regions": regions, "inputs": inputs, "outputs": outputs})}


def test_registered_regions_are_named_by_a_descriptor(open_session: Open, registered: dict[str, Registration]) -> None:
    key = file_of()
    registered["mine"] = Registration(key, 64, 1024)
    file = np.memmap(SHM / key, np.float32, "r+")
    file[16:20] = [1, 2, 3, 4]
    request = delivered(descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [0, 256, 16]}, ["mine"]), ["Y"])
    session = open_session()
    for _ in range(2):
        (response,) = session.serve([request], double)
        assert (response.error(), outputs_of(response)) == (None, {})
        assert file[80:84].tolist() == [2, 4, 6, 8]
    # What is passed on must be copied: no results tell where it is.
    session.serve([request], lambda call: call.put("Y", call.input("X")))
    assert file[80:84].tolist() == [1, 2, 3, 4]


X_ALONE: dict[str, Any] = {"inputs": {"X": [0, 0, 16, "FP32", [4]]}, "outputs": {}}
Y_ALONE: dict[str, Any] = {"inputs": {}, "outputs": {"Y": [0, 0, 16]}}


@pytest.mark.parametrize(("spans", "field"), [(X_ALONE, "inputs.X"), (Y_ALONE, "outputs.Y")])
@pytest.mark.parametrize(
    ("place", "refusal"),
    [((2, 1024), ".offset: found 0, expected a place at a multiple of 4"), ((0, 15), ": found 16 bytes at offset 0")],
)
def test_spans_in_a_registration_that_does_not_fit_are_refused(
    open_session: Open, registered: Any, spans: dict[str, Any], field: str, place: tuple[int, int], refusal: str
) -> None:
    registered["mine"] = Registration(file_of(), *place)
    found = error_of(open_session(), delivered(descriptor(**spans, names=["mine"]), ["Y"]), double)
    assert found.startswith(f"shm:table: {field}{refusal}")
