"""A model that has lent its client's memory and gives up, just before the memory is borrowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shm_backend_utils.memory.locks import SharedLease, borrow
from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of
from tests.unit.modes.doubling import FP32, Open, X, double
from tests.unit.table_client import Client


@pytest.fixture
def lender() -> Iterator[Client]:
    lender = Client()
    yield lender
    lender.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def borrowing(lender: Client, client: Client) -> InferenceRequest:
    """Return a lender's request whose tensors lie in its client's region."""
    header, at = client.region.header, client.data
    np.ndarray((4,), np.float32, client.region.bytes(), at)[...] = X
    claim = LentRegionClaim(client.region.segment.key, header.byte_size, header.token.hex(), 0)
    said = Table({"X": InputSpan(FP32, (4,), 1, at, 16)}, {"Y": OutputSpan(1, at + 64, 16)}, (claim,))
    return delivered(lender.begin(said), ["Y"])


def before_borrowing(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> list[bool]:
    """Have something happen when a request has been taken in, and is about to borrow; note what was borrowed."""
    borrowed: list[bool] = []

    def borrow_late(fd: int, record: int) -> SharedLease | None:
        happen()
        lease = borrow(fd, record)
        borrowed.append(lease is not None)
        return lease

    monkeypatch.setattr(policy, "borrow", borrow_late)
    return borrowed


def test_the_generation_is_looked_at_again_when_the_memory_is_borrowed(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, lender: Client, client: Client
) -> None:
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


def test_a_lender_that_does_not_give_up_is_served(
    open_session: Open, monkeypatch: pytest.MonkeyPatch, lender: Client, client: Client
) -> None:
    borrowed = before_borrowing(monkeypatch, lambda: None)
    (response,) = open_session().serve([borrowing(lender, client)], double)
    assert (response.error(), borrowed) == (None, [True])
    assert lender.is_over()
