"""Calls whose memory somebody holds when they arrive: they go out again, in other memory unless they were prepared."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError
from shm_backend_utils.errors import SlotInUseError
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.refusals import refusal
from tests.opened import open_region
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

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


SHAPES = {"IN0": ((6,), np.float32)}


async def infer_prepared(server: FakeServer, **named: float) -> np.ndarray[Any, Any]:
    async with async_client_of(server) as client:
        with await client.prepare("m", SHAPES) as call:
            call.inputs["IN0"][...] = X
            array: np.ndarray[Any, Any] = (await call.infer(**named))["OUT0"].copy()
            return array


def infer_prepared_blocking(server: FakeServer, **named: float) -> np.ndarray[Any, Any]:
    with client_of(server) as client, client.prepare("m", SHAPES) as call:
        call.inputs["IN0"][...] = X
        array: np.ndarray[Any, Any] = call.infer(**named)["OUT0"].copy()
        return array


PREPARED = {
    "blocking": infer_prepared_blocking,
    "async": lambda server, **named: asyncio.run(infer_prepared(server, **named)),
}
both_clients = pytest.mark.parametrize("infer", PREPARED.values(), ids=list(PREPARED))


@both_clients
def test_a_prepared_call_whose_slot_is_busy_is_sent_again_in_its_own_memory(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    def refuse_two(order: Order) -> None:
        if len(server.orders) < 3:
            raise busy()

    server.before = refuse_two
    np.testing.assert_array_equal(infer(server), 2 * X)
    assert len({order.parameters[SLOT_PARAMETER] for order in server.orders}) == 1
    generations = [order.parameters[GENERATION_PARAMETER] for order in server.orders]
    assert len(set(generations)) == 3, "each is executed once at the most"


@both_clients
def test_a_prepared_call_whose_slot_is_always_busy_is_an_error_in_the_end(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    def refuse(order: Order) -> None:
        raise busy()

    server.before = refuse
    with pytest.raises(InferenceError, match="shm:busy: "):
        infer(server)
    assert len(server.orders) == 3


@both_clients
def test_a_prepared_call_whose_slot_is_held_for_long_says_what_the_server_said(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    with contextlib.ExitStack() as stack:

        def hold_and_refuse(order: Order) -> None:
            address = parse_address(order.parameters[SLOT_PARAMETER])
            region = open_region(address.key, address.token, "region")
            stack.callback(region.close)
            lease = region.lease(address.slot)
            assert lease.take()
            stack.callback(lease.give_back)
            raise busy()

        server.before = hold_and_refuse
        with pytest.raises(InferenceError, match="shm:busy: "):
            infer(server)
    assert len(server.orders) == 1


@both_clients
def test_a_prepared_call_is_not_sent_again_when_its_time_is_over(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    def refuse_late(order: Order) -> None:
        time.sleep(0.1)
        raise busy()

    server.before = refuse_late
    with pytest.raises(InferenceError, match="shm:busy: "):
        infer(server, timeout_s=0.05)
    assert len(server.orders) == 1


@both_clients
def test_a_prepared_call_that_has_begun_is_not_sent_again(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    server.before = start_and_refuse
    with pytest.raises(InferenceError, match="shm:busy: "):
        infer(server)
    assert len(server.orders) == 1


@both_clients
def test_a_prepared_call_is_not_sent_again_for_another_refusal(
    server: FakeServer, infer: Callable[..., np.ndarray[Any, Any]]
) -> None:
    def refuse(order: Order) -> None:
        raise InferenceError("the model has no time", "StatusCode.CANCELLED")

    server.before = refuse
    with pytest.raises(InferenceError, match="has no time"):
        infer(server)
    assert len(server.orders) == 1


def start_and_refuse(order: Order) -> None:
    address = parse_address(order.parameters[SLOT_PARAMETER])
    region = open_region(address.key, address.token, "region")
    region.record(address.slot).started = order.parameters["shm_generation"]
    region.close()
    raise busy()


def test_a_call_that_has_begun_is_not_sent_again_whatever_the_answer_says(server: FakeServer) -> None:
    server.before = start_and_refuse
    with client_of(server) as client, pytest.raises(InferenceError, match="shm:busy: "):
        client.infer("m", {"IN0": X})
    assert len(server.orders) == 1
