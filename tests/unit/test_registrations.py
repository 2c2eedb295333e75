"""What a client has registered at a server: it is unregistered when that can be, and never forgotten before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import pytest

from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError, MemoryRefusedError
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Send, Steps
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE

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


@pytest.fixture
def _registered(server: Server, registrations: Registrations, region: SlotRegion) -> None:
    server.run(registrations.add(region, math.inf))
    assert server.registered == {region.key}
    assert region.is_registered


@pytest.mark.usefixtures("_registered")
def test_what_is_registered_is_not_registered_again(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_silent = True
    server.run(registrations.add(region, math.inf))


@pytest.mark.usefixtures("_registered")
def test_what_the_server_has_forgotten_is_registered_again(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.clear()
    registrations.forget(region)
    server.run(registrations.add(region, math.inf))
    assert server.registered == {region.key}


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


def test_what_an_earlier_attempt_has_registered_is_registered(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.add(region.key)
    server.run(registrations.add(region, math.inf))
    assert not region.is_spoiled
    assert not server.run(registrations.drop_all(math.inf))
    assert server.registered == set()


def test_memory_that_the_server_does_not_register_is_refused_and_not_used_again(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.refusal = "Unable to open shared memory region: '{}'"
    with pytest.raises(MemoryRefusedError, match="does not register the call's memory: Unable to open") as caught:
        server.run(registrations.add(region, math.inf))
    assert region.is_spoiled
    assert region.key not in str(caught.value)
    server.is_silent = True
    assert not server.run(registrations.drop_all(math.inf)), "there is nothing to unregister"


def test_nothing_of_others_is_ever_unregistered(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.add("another")
    server.run(registrations.add(region, math.inf))
    server.run(registrations.drop(["another"], math.inf))
    server.run(registrations.drop_all(math.inf))
    assert server.registered == {"another"}


@pytest.mark.usefixtures("_registered")
def test_what_is_not_wanted_is_unregistered(server: Server, registrations: Registrations, region: SlotRegion) -> None:
    assert not server.run(registrations.drop([region.key], math.inf))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_request_is_in_is_unregistered_later(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_busy = True
    assert server.run(registrations.drop([region.key], math.inf))
    assert server.registered == {region.key}
    server.is_busy = False
    assert not server.run(registrations.drop([], math.inf))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_server_does_not_answer_to_is_unregistered_later(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_silent = True
    assert not server.run(registrations.drop_all(math.inf))
    server.is_silent = False
    assert not server.run(registrations.drop_all(math.inf))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_somebody_else_has_unregistered_is_fine(
    server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.clear()
    assert not server.run(registrations.drop_all(math.inf))
    assert not server.run(registrations.drop_all(math.inf))
