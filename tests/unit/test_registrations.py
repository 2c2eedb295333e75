"""What a client has registered at a server: it is unregistered when that can be, and never forgotten before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.runtime import run
from shm_backend_utils.client.slot import Slot
from shm_backend_utils.memory.segment import PRIVATE


class Server:
    """Notes what is registered, and may have a request in it."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.is_busy = False
        self.is_silent = False

    async def register(self, name: str, key: str, byte_size: int, timeout_s: float) -> None:
        self.registered.add(name)

    async def unregister(self, name: str, timeout_s: float) -> None:
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
def slot() -> Iterator[Slot]:
    with contextlib.closing(_Slot(4096, 1, PRIVATE)) as slot:
        yield slot


class _Slot(Slot):
    def close(self) -> None:
        self.destroy()


@pytest.fixture
def _registered(server: Server, registrations: Registrations, slot: Slot) -> None:
    run(registrations.add(slot, 1.0))
    assert server.registered == {slot.key}


@pytest.mark.usefixtures("_registered")
def test_what_is_not_wanted_is_unregistered(server: Server, registrations: Registrations, slot: Slot) -> None:
    assert not run(registrations.drop([slot.key], 1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_request_is_in_is_unregistered_later(server: Server, registrations: Registrations, slot: Slot) -> None:
    server.is_busy = True
    assert run(registrations.drop([slot.key], 1.0))
    assert server.registered == {slot.key}
    server.is_busy = False
    assert not run(registrations.drop([], 1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_a_server_does_not_answer_to_is_unregistered_later(
    server: Server, registrations: Registrations, slot: Slot
) -> None:
    server.is_silent = True
    assert not run(registrations.drop_all(1.0))
    server.is_silent = False
    assert not run(registrations.drop_all(1.0))
    assert server.registered == set()


@pytest.mark.usefixtures("_registered")
def test_what_somebody_else_has_unregistered_is_fine(server: Server, registrations: Registrations, slot: Slot) -> None:
    server.registered.clear()
    assert not run(registrations.drop_all(1.0))
    assert not run(registrations.drop_all(1.0))
