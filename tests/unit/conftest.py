"""What every unit test may ask for."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.cli import shared_memory
from shm_backend_utils.cli.doctor import server_checks
from shm_backend_utils.client import aio
from shm_backend_utils.client import client as client_module
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory import reaper, segment, shared_file
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import ShmSession
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import AsyncFakeTransport, FakeTransport
from tests.unit.gpu.fakes import CLIENT, runtime_that_gives_all_back
from tests.unit.mapping.files import SHM, region_bytes
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def client_cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back(CLIENT) as cuda:
        yield cuda


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server of one model, whose clients are in the test's process."""
    with FakeServer(config("m")) as server:
        yield server


@pytest.fixture
def server_of_every_client(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "connect", lambda *_: FakeTransport(server, "grpc"))
    monkeypatch.setattr(aio, "connect_async", lambda *_: AsyncFakeTransport(server, "grpc"))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as session:
        yield session


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of such a session, with as many slots as the module names as ``SLOTS``."""
    client = Client(slots=getattr(request.module, "SLOTS", 1))
    yield client
    client.close()


@pytest.fixture
def own_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm for this test alone: clients of other processes reap in /dev/shm itself."""
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=SHM))
    for module in (reaper, segment, shared_file, shared_memory, server_checks):
        monkeypatch.setattr(module, "DEV_SHM", folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc without processes, of which tests add some: to look into all of a machine's may take seconds."""
    folder = tmp_path / "proc"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "_PROC", folder)
    return folder


@pytest.fixture
def dead(own_shm: Path) -> Path:
    """The region of a process that is gone: a file with a header, and nobody's lease."""
    path = own_shm / "shmbu-1-0123456789abcdef"
    path.write_bytes(region_bytes())
    return path


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    """A managed region of two slots, as its owner has it."""
    region = ManagedRegion.create(100, slot_count=2)
    yield region
    region.segment.unlink()
    region.close()
