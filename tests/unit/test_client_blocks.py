"""Calls of a model with a batcher lie side by side where they are under way together; no lone call pays for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.protocol.address import SLOT_PARAMETER, parse_address
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m", dims="3", max_batch_size=16, dynamic_batching={})) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server, path="direct") as client:
        client.infer("m", {"IN0": np.ones((2, 3), np.float32)}).release()
        server.orders.clear()
        yield client


def regions(server: FakeServer) -> list[str]:
    """Return the region of each request since the last time."""
    keys = [parse_address(order.parameters[SLOT_PARAMETER]).key for order in server.orders]
    server.orders.clear()
    return keys


def together(server: FakeServer, client: ShmClient, sizes: list[int]) -> int:
    """Make calls of so many rows, all sent before one is answered; return in how many regions they lay."""
    all_are_sent = threading.Barrier(len(sizes))

    def wait(_: Order) -> None:
        all_are_sent.wait(30)

    server.before = wait
    futures = [client.submit("m", {"IN0": np.full((size, 3), size, np.float32)}) for size in sizes]
    assert all((future.result(30)["OUT0"] == 2 * size).all() for size, future in zip(sizes, futures, strict=True))
    server.before = lambda _: None
    return len(set(regions(server)))


def test_calls_one_after_another_begin_no_block_even_while_results_are_held(
    server: FakeServer, client: ShmClient
) -> None:
    held = [client.infer("m", {"IN0": np.ones((2, 3), np.float32)}) for _ in range(3)]
    assert len(set(regions(server))) == len(held)


def test_calls_under_way_together_share_a_region_and_the_next_one_alone_counts_on_others_but_once(
    server: FakeServer, client: ShmClient
) -> None:
    assert together(server, client, [2] * 5) == 2, "the first one could not know of the others"
    assert together(server, client, [2] * 5) == 1, "now it counts on them"
    for _ in range(2):
        client.infer("m", {"IN0": np.ones((2, 3), np.float32)}).release()
    assert len(set(regions(server))) == 2
    assert together(server, client, [2, 3, 2, 3]) == 4, "those of another shape are no neighbours"
