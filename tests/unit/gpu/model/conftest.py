"""Sessions and a client of theirs, virtual processes of the fake driver, which give back all that they had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.fakes import DRIVER
from tests.unit.gpu.model.device_calls import Calls, Client, calls_of


@pytest.fixture
def client(client_cuda: CudaRuntime) -> Iterator[Client]:
    with contextlib.closing(Client(client_cuda)) as client:
        yield client


@pytest.fixture
def calls(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with calls_of(cuda, client, monkeypatch) as calls:
        yield calls


@pytest.fixture
def calls_by_events(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Calls of a session that leaves waiting to its client, and has served before."""
    with calls_of(cuda, client, monkeypatch, gpu_events=True) as calls:
        calls.serve(lambda call: None)
        DRIVER.forget()
        yield calls
