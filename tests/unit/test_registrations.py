"""What a client has registered at a server: it is unregistered when that can be, and never forgotten before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import BlockingDriver
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.protocol.layout import PAGE_SIZE

Run = Callable[[Any], Any]


class Server:
    """Codec, transport and server in one. It notes what is registered, and may have a request in it."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.is_busy = False
        self.is_silent = False

    def register(self, name: str, key: str, byte_size: int) -> tuple[str, str]:
        return "register", name

    def unregister(self, name: str) -> tuple[str, str]:
        return "unregister", name

    def send(self, message: tuple[str, str], timeout_s: float) -> None:
        action, name = message
        if action == "register":
            self.registered.add(name)
            return
        if self.is_silent:
            raise DeadlineExceededError("the server did not answer")
        if self.is_busy:
            raise InferenceError(f"Cannot unregister shared memory region '{name}', it is currently in use.")
        if name not in self.registered:
            raise InferenceError(f"Unable to find shared memory region: '{name}'")
        self.registered.remove(name)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def registrations(server: Server) -> Registrations:
    return Registrations(cast(Any, server))


@pytest.fixture
def region() -> Iterator[SlotRegion]:
    region = SlotRegion(4096, 1, PAGE_SIZE, PRIVATE)
    yield region
    region.destroy()


@pytest.fixture
def run(server: Server) -> Run:
    return BlockingDriver(cast(Any, server)).run


@pytest.fixture
def _registered(run: Run, server: Server, registrations: Registrations, region: SlotRegion) -> None:
    run(registrations.add(region, 1.0))
    assert server.registered == {region.key}


@pytest.mark.usefixtures("_registered")
def test_what_is_not_wanted_is_unregistered(
    run: Run, server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    assert not run(registrations.drop([region.key], 1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_request_is_in_is_unregistered_later(
    run: Run, server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_busy = True
    assert run(registrations.drop([region.key], 1.0))
    assert server.registered == {region.key}
    server.is_busy = False
    assert not run(registrations.drop([], 1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_server_does_not_answer_to_is_unregistered_later(
    run: Run, server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.is_silent = True
    assert not run(registrations.drop_all(1.0))
    server.is_silent = False
    assert not run(registrations.drop_all(1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_somebody_else_has_unregistered_is_fine(
    run: Run, server: Server, registrations: Registrations, region: SlotRegion
) -> None:
    server.registered.clear()
    assert not run(registrations.drop_all(1.0))
    assert not run(registrations.drop_all(1.0))
