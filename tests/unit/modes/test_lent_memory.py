"""Requests whose tensors lie in memory that another model has lent."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import Call
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, message_of
from tests.unit.modes.doubling import FP32, Open, X, double
from tests.unit.table_client import Client


def lent(client: Client, slot: int = 0, **changes: Any) -> LentRegionClaim:
    header = client.region.header
    fields = {
        "key": client.region.segment.key,
        "byte_size": header.byte_size,
        "token": header.token.hex(),
        "slot": slot,
        **changes,
    }
    return LentRegionClaim(**fields)


def borrowing(lender: Client, client: Client, **changes: Any) -> InferenceRequest:
    """Return a lender's request whose tensors lie in its client's region."""
    at = client.data
    np.ndarray((4,), np.float32, client.region.bytes(), at)[...] = X
    said = Table({"X": InputSpan(FP32, (4,), 1, at, 16)}, {"Y": OutputSpan(1, at + 64, 16)}, (lent(client, **changes),))
    return delivered(lender.begin(said), ["Y"])


def test_lent_memory_is_used_and_held(open_session: Open) -> None:
    lender, client = Client(), Client()
    held: list[bool] = []

    def infer(call: Call) -> None:
        held.append(client.is_free())
        double(call)

    (response,) = open_session().serve([borrowing(lender, client)], infer)
    assert response.error() is None
    assert (held, client.is_free(), client.region.record(0).completed) == ([False], True, 0)
    place = lender.places(byte_sizes=[client.region.header.byte_size])["Y"]
    assert (place.region, place.offset) == (1, client.data + 64)
    assert lender.is_over()
    for each in (lender, client):
        each.close()


def test_memory_that_the_client_takes_back_is_not_borrowed(open_session: Open) -> None:
    lender, client = Client(), Client()
    assert client.region.lease(0).take_back()
    (response,) = open_session().serve([borrowing(lender, client)], double)
    assert message_of(response).startswith("shm:stale: the client takes back the memory")
    assert lender.is_free()
    assert lender.region.record(0).started == 0
    client.region.lease(0).give_back()
    for each in (lender, client):
        each.close()


def test_a_lender_that_is_gone_has_lent_nothing(open_session: Open) -> None:
    lender, client = Client(), Client()
    request = borrowing(lender, client)
    session = open_session()
    fresh = ManagedRegion.open(lender.region.segment.key, lender.region.header.token.hex(), "region")
    lender.region.close()  # as if its process had died: the name is there, the owner's lease is not
    (response,) = session.serve([request], double)
    assert message_of(response).startswith("shm:stale: the model that has lent")
    assert fresh.record(0).started == 0
    assert client.is_free()
    fresh.segment.unlink()
    fresh.close()
    client.close()


@pytest.mark.parametrize("changes", [{"slot": 1}, {"byte_size": 100_000_000}, {"byte_size": 8192}], ids=str)
def test_lent_memory_that_is_not_as_claimed_is_refused(open_session: Open, changes: dict[str, Any]) -> None:
    lender, client = Client(), Client()
    (response,) = open_session().serve([borrowing(lender, client, **changes)], double)
    assert message_of(response).startswith("shm:table: ")
    for each in (lender, client):
        assert each.is_free()
        each.close()


def test_records_of_lent_regions_are_no_data(open_session: Open) -> None:
    lender, client = Client(), Client()
    said = Table({"X": InputSpan(FP32, (4,), 1, 4096, 16)}, {}, (lent(client),))
    (response,) = open_session().serve([delivered(lender.begin(said), ["Y"])], double)
    assert message_of(response).startswith("shm:table: inputs.X: found 16 bytes at offset 4096")
    for each in (lender, client):
        each.close()


def test_the_slots_own_region_is_not_lent_as_well(open_session: Open) -> None:
    client = Client()
    begin = time.monotonic()
    (response,) = open_session().serve([borrowing(client, client)], double)
    assert message_of(response) == (
        "shm:table: regions[1]: found memory that the request names before, expected every region once"
    )
    assert time.monotonic() - begin < 0.5
    assert client.is_free()
    client.close()
