"""What every unit test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.client import aio
from shm_backend_utils.client import client as client_module
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import ShmSession
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import AsyncFakeTransport, FakeTransport
from tests.unit.gpu.fakes import CLIENT, runtime_that_gives_all_back
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    """The CUDA of a model's process."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def client_cuda() -> Iterator[CudaRuntime]:
    """The CUDA of a client's process, whose memory it is."""
    with runtime_that_gives_all_back(CLIENT) as cuda:
        yield cuda


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server of one model, whose clients are in the test's process."""
    with FakeServer(config("m")) as server:
        yield server


@pytest.fixture
def server_of_every_client(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whatever clients a test makes connect to that server."""
    monkeypatch.setattr(client_module, "connect", lambda *_: FakeTransport(server, "grpc"))
    monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, "grpc"))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    """A model's session."""
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        yield session


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of such a session, with as many slots as the module names as ``SLOTS``."""
    client = Client(slots=getattr(request.module, "SLOTS", 1))
    yield client
    client.close()


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    """A managed region of two slots, as its owner has it."""
    region = ManagedRegion.create(100, slot_count=2)
    yield region
    region.segment.unlink()
    region.close()
