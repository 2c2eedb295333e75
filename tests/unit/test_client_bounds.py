"""What a client keeps of models, registrations, memory and connections: it has an end, whatever it is asked to do."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PathUnavailableError, ShmClient
from shm_backend_utils.errors import RegionRefusedError, TensorError
from shm_backend_utils.memory.pool.need import Need, region_size
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of

X: Final = np.arange(6, dtype=np.float32)
MANY: Final = 300


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m")) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server) as client:
        yield client


def core_of(client: ShmClient) -> Any:
    return cast(Any, client._core)


# Models


def test_models_that_there_are_not_are_not_kept(client: ShmClient) -> None:
    for number in range(MANY):
        with pytest.raises(InferenceError):
            client.infer(f"nobody's {number}", {"IN0": X})
    assert core_of(client).catalog.known == {}


def test_calls_that_do_not_fit_keep_nothing(client: ShmClient) -> None:
    client.infer("m", {"IN0": X})
    (known,) = core_of(client).catalog.known.values()
    for number in range(MANY):
        with pytest.raises(TensorError):
            client.infer("m", {f"IN{number + 1}": X}, outputs={f"OUT{number}": 4})
    assert list(core_of(client).catalog.known.values()) == [known]
    assert set(known.learned) <= {"OUT0"}


def test_one_refusal_is_kept_for_each_path(client: ShmClient, server: FakeServer) -> None:
    refused: list[int] = []

    def refuse(_: Order) -> None:
        refused.append(1)
        raise InferenceError(refusal(RegionRefusedError("region", f"for the {len(refused)}th time")))

    client.infer("m", {"IN0": X})
    server.before = refuse
    for _ in range(20):
        with contextlib.suppress(InferenceError, PathUnavailableError):
            client.infer("m", {"IN0": X}, path="direct")
    (known,) = core_of(client).catalog.known.values()
    assert known.refusals.keys() == {"direct"}


def test_a_refusal_holds_no_longer_than_the_next_look(client: ShmClient, server: FakeServer) -> None:
    def refuse(order: Order) -> None:
        if "shm_slot" in order.parameters:
            raise InferenceError(refusal(RegionRefusedError("region", "for now")))

    server.before = refuse
    assert client.infer("m", {"IN0": X}).path != "direct"
    server.before = lambda _: None
    assert client.explain("m").path == "direct"
    assert client.infer("m", {"IN0": X}).path == "direct"


# Registrations


def test_memory_that_comes_and_goes_is_not_registered_for_ever(server: FakeServer) -> None:
    budget = 4 * region_size(Need(1 << 16))
    with client_of(server, pool=PoolOptions(max_bytes=budget)) as client:
        rng = random.Random(1)
        for _ in range(MANY):
            given = np.full(rng.randint(1, 1 << 14), rng.random(), np.float32)
            result = client.infer("m", {"IN0": given}, path="triton-shm", outputs={"OUT0": given.nbytes})
            np.testing.assert_array_equal(result["OUT0"], 2 * given)
            del result
        known = core_of(client)._registrations._known
        assert known == set(server.registered)
        assert len(known) <= client.stats().slots_idle + 1
    assert server.registered == {}


def test_memory_that_the_server_does_not_register_is_not_kept(
    client: ShmClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.infer("m", {"IN0": X}, path="triton-shm")
    registrations = core_of(client)._registrations
    before = set(registrations._known)

    def refuse(*_: object) -> None:
        raise InferenceError("no more of these")

    monkeypatch.setattr(server, "register", refuse)
    for number in range(20):
        with contextlib.suppress(InferenceError, PathUnavailableError):
            client.infer("m", {"IN0": np.zeros(1000 << (number % 8), np.float32)}, path="triton-shm")
    assert registrations._known <= before


# Memory


def test_kinds_without_end_leave_no_more_shelves_than_regions() -> None:
    budget = 8 * region_size(Need(PAGE_SIZE, 4, 4 * PAGE_SIZE))
    rng = random.Random(1)
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget))) as pool:
        for number in range(MANY):
            need = Need(rng.randint(1, PAGE_SIZE), rng.randint(1, 4), rng.randint(1, 4) * PAGE_SIZE, f"{number}")
            pool.redeem(pool.request(need, "nobody"))
            shelves = pool._inventory.shelves
            regions = pool.status.idle + pool.status.held + pool.status.quarantined
            assert sum(map(len, shelves.values())) <= regions
            assert pool.status.byte_size <= budget
    assert pool._inventory.shelves == {}


def test_an_idle_region_is_never_another_kinds() -> None:
    rng = random.Random(1)
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=1 << 24))) as pool:
        for _ in range(MANY):
            need = Need(rng.randint(1, 3 * PAGE_SIZE), rng.randint(1, 3), rng.randint(1, 2) * PAGE_SIZE)
            region, memory = pool.redeem(pool.request(need, "somebody"))
            assert len(region.slots) == need.slot_count
            assert region.slots[0].record.room == need.record_byte_size // 2
            assert region.capacity >= need.byte_size
            del region, memory
