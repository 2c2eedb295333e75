"""What a client has registered at a server: it is unregistered when that can be, and never forgotten before.

A region's name goes before it is unregistered, so that a registration that comes late finds nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError, MemoryRefusedError
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Send, Steps
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.pool.need import Need, region_size
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.e2e.eventually import eventually
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

T = TypeVar("T")


class Codec:
    """Makes messages that the server below reads."""

    def register(self, name: str, key: str, byte_size: int) -> tuple[str, str]:
        assert key == f"/{name}"
        return "register", name

    def unregister(self, name: str) -> tuple[str, str]:
        return "unregister", name


class Server:
    """Notes what is registered, and may have a request in it."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.refusal = ""
        self.is_busy = False
        self.is_silent = False
        self.is_late = False
        """It does what it is asked to do, but its answer does not come in time."""

    def run(self, operation: Steps[T]) -> T:
        """Do an operation that does nothing but send."""
        step = None
        try:
            step = next(operation)
            while True:
                assert isinstance(step, Send)
                try:
                    self._answer(*step.message)
                except ShmError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(None)
        except StopIteration as end:
            value: T = end.value
            return value

    def _answer(self, what: str, name: str) -> None:
        if self.is_silent:
            raise DeadlineExceededError("the server did not answer")
        if what == "register":
            self._register(name)
        elif self.is_busy:
            raise InferenceError(f"Cannot unregister shared memory region '{name}', it is currently in use.")
        elif name not in self.registered:
            raise InferenceError(f"Unable to find shared memory region: '{name}'")
        else:
            self.registered.remove(name)
        if self.is_late:
            raise DeadlineExceededError("the server did not answer")

    def _register(self, name: str) -> None:
        if self.refusal:
            raise InferenceError(self.refusal.format(name))
        if name in self.registered:
            raise InferenceError(f"shared memory region '{name}' already in manager")
        self.registered.add(name)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def registrations() -> Registrations:
    return Registrations(cast(Any, Codec()))


@pytest.fixture
def region() -> Iterator[SlotRegion]:
    region = SlotRegion(4096, 1, PAGE_SIZE, PRIVATE)
    yield region
    region.destroy()


def test_what_is_registered_is_registered_again_only_if_the_server_has_forgotten_it(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.add(region.key)  # by an earlier attempt
    server.run(registrations.add(region, math.inf))
    assert (region.is_registered, region.state) == (True, "free")
    server.is_silent = True
    server.run(registrations.add(region, math.inf))
    server.is_silent = False
    server.registered.clear()
    registrations.forget(region)
    server.run(registrations.add(region, math.inf))
    assert server.registered == {region.key}


def test_what_is_not_wanted_is_unregistered_when_that_can_be_and_nothing_of_others(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.add("another")
    server.run(registrations.add(region, math.inf))
    server.is_busy = True  # a request is in it
    assert server.run(registrations.drop([region.key, "another"], math.inf))
    assert server.registered == {region.key, "another"}
    server.is_busy, server.is_silent = False, True
    assert not server.run(registrations.drop(None, math.inf))
    assert server.registered == {region.key, "another"}
    server.is_silent = False
    assert not server.run(registrations.drop([], math.inf))
    assert server.registered == {"another"}


def test_what_somebody_else_has_unregistered_is_fine(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.run(registrations.add(region, math.inf))
    server.registered.clear()
    for _ in range(2):
        assert not server.run(registrations.drop(None, math.inf))


def test_what_was_registered_by_an_attempt_without_an_answer_is_unregistered(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_late = True
    with pytest.raises(DeadlineExceededError):
        server.run(registrations.add(region, math.inf))
    assert region.is_registered, "nobody knows"
    server.is_late = False
    server.run(registrations.drop([region.key], math.inf))
    assert server.registered == set()


def test_memory_that_the_server_does_not_register_is_refused_and_not_used_again(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.refusal = "Unable to open shared memory region: '{}'"
    with pytest.raises(MemoryRefusedError, match="does not register the call's memory: Unable to open") as caught:
        server.run(registrations.add(region, math.inf))
    assert region.state == "spoiled"
    assert region.key not in str(caught.value)
    server.is_silent = True
    assert not server.run(registrations.drop(None, math.inf)), "there is nothing to unregister"


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
    return pool.redeem(pool.request(need, "taker"))


def known_region(pool: SlotPool) -> SlotRegion:
    """Return an idle region that the server knows."""
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
    "it was promised to make way": lambda pool: pool.withdraw(pool.request(LARGER, "taker")),
    "it is spoiled": spoil,
    "the pool is closed": SlotPool.close,
    "the pool is abandoned": SlotPool.abandon,
}


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
