"""Requests whose tensors lie in memory that another model has lent, or in regions that are registered at the server."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import StaleRequestError
from shm_backend_utils.memory.locks import SharedLease, borrow
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.claims_of import claim_of_region
from tests.unit.emulated import delivered, error_code, error_of, message_of, outputs_of
from tests.unit.modes.conftest import FP32, MakeClient, Open, X
from tests.unit.sessions import double, say_registered
from tests.unit.table_client import Client


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


@pytest.mark.parametrize("changes", [{"slot": 1}, {"byte_size": 100_000_000}, {"byte_size": 8192}], ids=str)
def test_other_lent_memory_fails(open_session: Open, lender: Client, client: Client, changes: dict[str, Any]) -> None:
    assert error_of(open_session(), borrowing(lender, client, **changes), double).startswith("shm:table: ")
    for each in (lender, client):
        assert each.is_free()


def test_records_of_lent_regions_are_no_data(open_session: Open, lender: Client, client: Client) -> None:
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

    (response,) = open_session().serve([borrowing(lender, client)], infer)
    assert (borrowed, executed) == ([True], [])
    assert response.error() is not None
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


def file_of(byte_size: int = 4096) -> str:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    (SHM / key).write_bytes(bytes(byte_size))
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
    ("offset", "byte_size", "refusal"),
    [(2, 1024, ".offset: found 0, expected a place at a multiple of 4"), (0, 15, ": found 16 bytes at offset 0")],
    ids=["at an odd place", "one byte too short"],
)
def test_spans_in_a_registration_that_does_not_fit_are_refused(
    open_session: Open,
    registered: dict[str, Registration],
    spans: dict[str, Any],
    field: str,
    offset: int,
    byte_size: int,
    refusal: str,
) -> None:
    registered["mine"] = Registration(file_of(), offset, byte_size)
    found = error_of(open_session(), delivered(descriptor(**spans, names=["mine"]), ["Y"]), double)
    assert found.startswith(f"shm:table: {field}{refusal}")
