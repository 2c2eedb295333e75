"""A session and a client of it, virtual processes of the fake driver, which give back all that they had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import ShmSession
from tests.unit.calls_on_gpus.device_calls import Client, session_on
from tests.unit.fake_gpu import stream_on


@pytest.fixture
def client(client_cuda: CudaRuntime) -> Iterator[Client]:
    client = Client(client_cuda)
    yield client
    client.close()


@pytest.fixture
def session(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    session = session_on(cuda, monkeypatch)
    yield session
    session.close()


@pytest.fixture
def stream(cuda: CudaRuntime) -> Iterator[int]:
    """A stream of the model's own, on the instance's GPU."""
    with stream_on(cuda) as stream:
        yield stream
