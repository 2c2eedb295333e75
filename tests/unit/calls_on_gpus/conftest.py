"""A session and a client of it, each with a fake GPU of its own, which gives back all that it had."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shm_backend_utils.model import ShmSession
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.calls_on_gpus.device_calls import Client, session_on
from tests.unit.fake_gpu import objects_of, runtime_that_gives_all_back


@pytest.fixture
def client_cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
    assert objects_of(os.getpid()) == []


@pytest.fixture
def cuda(client_cuda: FakeCuda) -> Iterator[FakeCuda]:
    """The CUDA of the model's process."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def client(client_cuda: FakeCuda) -> Iterator[Client]:
    client = Client(client_cuda)
    yield client
    client.close()


@pytest.fixture
def session(cuda: FakeCuda, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    session = session_on(cuda, monkeypatch)
    yield session
    session.close()
