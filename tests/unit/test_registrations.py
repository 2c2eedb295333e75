"""What a client has registered at a server: it is unregistered when that can be, and never forgotten before.

A region's name goes before it is unregistered, so that a registration that comes late finds nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.client.errors import DeadlineExceededError
from shm_backend_utils.memory.pool.inventory import Need, region_size
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from tests.e2e.eventually import eventually
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

SHM = Path("/dev/shm")
X = np.arange(4, dtype=np.float32)
NEED = Need(1, group="triton-shm")
LARGER = Need(2 * region_size(NEED), group="triton-shm")


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool in which one region makes way for the other."""
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=region_size(LARGER)))) as pool:
        yield pool


def take(pool: SlotPool, need: Need = NEED) -> tuple[SlotRegion, object]:
    return pool.take_granted(pool.request(need, "taker"))


def known_region(pool: SlotPool) -> SlotRegion:
    region, _ = take(pool)
    region.is_registered = True
    return region


def spoil(pool: SlotPool) -> None:
    region, memory = take(pool)
    region.spoil("lost")
    del memory
    eventually(lambda: pool.status.byte_size == 0)


WAYS_TO_GO: dict[str, Callable[[SlotPool], object]] = {
    "it is idle for too long": SlotPool.drop_idle,
    "it makes way for another": lambda pool: take(pool, LARGER),
    "it made way for a waiter that gave up": lambda pool: pool.withdraw(pool.request(LARGER, "taker")),
    "it is spoiled": spoil,
    "the pool is closed": SlotPool.close,
    "the pool is abandoned": SlotPool.abandon,
}


def test_keys_that_another_thread_takes_meanwhile_are_no_error(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(deque[str]):
        def popleft(self) -> str:
            self.clear()
            return super().popleft()

    monkeypatch.setattr(pool._inventory, "_unregistered", Shared(["key"]))
    assert pool.take_unregistered() == []


@pytest.mark.parametrize("go", WAYS_TO_GO.values(), ids=list(WAYS_TO_GO))
def test_nobody_is_told_to_unregister_a_region_that_has_its_name(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch, go: Callable[[SlotPool], object]
) -> None:
    region = known_region(pool)
    key = region.key
    told_too_early: list[str] = []
    destroy = SlotRegion.destroy

    def destroy_late(destroyed: SlotRegion) -> None:
        told_too_early.extend(pool.take_unregistered())  # as another thread may ask just then
        destroy(destroyed)

    monkeypatch.setattr(SlotRegion, "destroy", destroy_late)
    assert (SHM / key).exists()
    go(pool)
    assert told_too_early == []
    assert not (SHM / key).exists()
    assert pool.take_unregistered() == [key]


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the server was told to unregister, and whether it had its name then; without what finds out the path."""
    told: list[tuple[str, bool]] = []
    unregister = FakeServer.unregister

    def noting(server: FakeServer, name: str) -> None:
        if server.orders:
            told.append((name, (SHM / name).exists()))
        unregister(server, name)

    monkeypatch.setattr(FakeServer, "unregister", noting)
    return told


def test_a_client_that_closes_removes_its_memory_and_then_unregisters_it(unregistered: list[tuple[str, bool]]) -> None:
    with FakeServer(config("m")) as server:
        with client_of(server) as client:
            client.infer("m", {"IN0": X}, path="triton-shm")
            (name,) = server.registered
            assert (SHM / name).exists()
        assert unregistered == [(name, False)]


def test_memory_of_a_request_without_an_answer_is_removed_and_then_unregistered(
    unregistered: list[tuple[str, bool]],
) -> None:
    with FakeServer(config("m")) as server, client_of(server) as client:

        def be_silent(_: object) -> None:
            raise DeadlineExceededError("no answer")

        client.infer("m", {"IN0": X}, path="triton-shm")
        (name,) = server.registered
        server.before = be_silent
        with pytest.raises(DeadlineExceededError):
            client.infer("m", {"IN0": X}, path="triton-shm")
        eventually(lambda: client.stats().quarantined == 0)
        assert not (SHM / name).exists()
        server.before = lambda _: None
        client.infer("m", {"IN0": X}, path="triton-shm")
        assert unregistered == [(name, False)]
