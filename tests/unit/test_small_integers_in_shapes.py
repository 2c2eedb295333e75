"""Shapes of NumPy's small integers, whose products overflow without a word: they are read as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import Call, ShmSession
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    outputs = [tensor("Y", "UINT8", [-1, -1])]
    with session_of(monkeypatch, [tensor("X")], outputs) as session:
        yield session


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16])
def test_an_output_has_as_many_bytes_as_its_shape_says(session: ShmSession, client: Client, kind: Any) -> None:
    """16 times 16 is 0 in 8 bits."""

    def infer(call: Call) -> None:
        call.output("Y", (kind(16), kind(16)), np.uint8).numpy()[:] = 7

    for _ in range(2):
        (response,) = session.serve([client.request({}, {"Y": 256})], infer)
        assert response.error() is None
        place = client.places()["Y"]
        assert (place.shape, place.byte_size) == ((16, 16), 256)
        assert client.output("Y").tolist() == [[7] * 16] * 16


def test_an_output_that_does_not_fit_is_not_put_where_there_is_no_room(session: ShmSession, client: Client) -> None:
    def infer(call: Call) -> None:
        call.output("Y", (np.uint8(16), np.uint8(16)), np.uint8).numpy()[:] = 7

    (response,) = session.serve([client.request({}, {"Y": 16})], infer)
    assert response.error() is None
    assert client.places()["Y"].is_in_response
