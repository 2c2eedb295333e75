"""What results say of outputs that are inputs passed on: their own names, and places that the client may read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.claims import NamedRegionClaim
from shm_backend_utils.protocol.named import encode_descriptor
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from tests.unit.emulated import delivered, outputs_of
from tests.unit.registered import say_registered
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X"), tensor("B", "UINT8")], [tensor("Y")]) as session:
        yield session


@pytest.fixture
def client() -> Iterator[Client]:
    with contextlib.closing(Client()) as client:
        yield client


def pass_on(call: Call) -> None:
    call.put("Y", call.input("X"))


def test_a_delivered_input_that_is_passed_on_has_the_outputs_name(session: ShmSession, client: Client) -> None:
    request = delivered(client.begin(client.laid_out({}, {})), ["Y"], {"X": X})
    (response,) = session.serve([request], pass_on)
    assert response.error() is None
    assert list(outputs_of(response)) == list(client.places()) == ["Y"]


def test_bytes_of_an_input_that_are_read_as_larger_elements_are_copied_to_where_they_may_lie(
    session: ShmSession, client: Client
) -> None:
    given = np.arange(64, dtype=np.uint8)

    def infer(call: Call) -> None:
        call.put("Y", call.input("B").numpy()[1:17].view(np.float32))

    (response,) = session.serve([client.request({"B": given}, {"Y": 16})], infer)
    assert response.error() is None
    np.testing.assert_array_equal(client.output("Y").view(np.uint8), given[1:17])


def test_an_object_that_is_registered_under_another_name_still_has_its_slots(
    monkeypatch: pytest.MonkeyPatch, session: ShmSession, client: Client
) -> None:
    key, size = client.region.segment.key, client.region.header.byte_size
    name = f"other-name-{os.getpid()}"
    say_registered(monkeypatch, lambda: {"named": Registration(f"/{name}", 0, size)})
    at = client.data
    said = Table(
        {"X": InputSpan(BY_NAME["FP32"], (4,), 1, at, 16)},
        {"Y": OutputSpan(1, at + 256, 16)},
        (NamedRegionClaim("named"),),
    )
    Path(f"/dev/shm/{name}").hardlink_to(f"/dev/shm/{key}")
    try:
        (first,) = session.serve([delivered({"shm_io": encode_descriptor("m", said)}, ["Y"])], pass_on)
        (second,) = session.serve([client.request({"X": X}, {"Y": 16})], pass_on)
    finally:
        Path(f"/dev/shm/{name}").unlink()
    assert (first.error(), second.error()) == (None, None)
    np.testing.assert_array_equal(client.output("Y"), X)
