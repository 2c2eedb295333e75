"""Calls whose memory somebody holds when they arrive: they go out again, in other memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError
from shm_backend_utils.errors import SlotInUseError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.address import SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m")) as server:
        yield server


def busy() -> InferenceError:
    return InferenceError(refusal(SlotInUseError("the slot is in use")), "StatusCode.CANCELLED")


def test_a_call_whose_slot_is_busy_is_sent_again_in_other_memory(server: FakeServer) -> None:
    def refuse_the_first(order: Order) -> None:
        if len(server.orders) == 1:
            raise busy()

    server.before = refuse_the_first
    with client_of(server) as client:
        np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)
        assert client.stats().failures == 0
    first, second = [order.parameters[SLOT_PARAMETER] for order in server.orders]
    assert first != second


def test_a_slot_that_is_always_busy_is_an_error_in_the_end(server: FakeServer) -> None:
    def refuse(order: Order) -> None:
        raise busy()

    server.before = refuse
    with client_of(server) as client, pytest.raises(InferenceError, match="shm:busy: "):
        client.infer("m", {"IN0": X})
    assert len(server.orders) == 3


def test_a_call_that_has_begun_is_not_sent_again_whatever_the_answer_says(server: FakeServer) -> None:
    def start_and_refuse(order: Order) -> None:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        region = ManagedRegion.open(address.key, address.token, "region")
        region.record(address.slot).started = order.parameters["shm_generation"]
        region.close()
        raise busy()

    server.before = start_and_refuse
    with client_of(server) as client, pytest.raises(InferenceError, match="shm:busy: "):
        client.infer("m", {"IN0": X})
    assert len(server.orders) == 1
