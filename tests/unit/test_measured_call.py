"""Calls that a session with metrics counts: when they end, and as what they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError, ModelError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.debug import MeasuredDebugCall
from shm_backend_utils.model.metrics import MeasuredCall
from tests.unit.emulated import delivered, error_code
from tests.unit.fake_gpu import DRIVER, MODEL, runtime_that_gives_all_back
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)


class Metrics:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def answered(self, path: str, zero_copy_bytes: int, copied_bytes: int) -> None:
        self.told.append((path, zero_copy_bytes, copied_bytes))

    def refused(self, error: BaseException) -> None:
        self.told.append(type(error))

    def took(self, own_s: float) -> None:
        assert own_s > 0
        self.told.append("time")


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def session(cuda: CudaRuntime, metrics: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    access = CudaAccess(lambda: cuda)
    with session_of(monkeypatch, [tensor("X"), tensor("W")], [tensor("Y"), tensor("Z")], cuda=access) as session:
        monkeypatch.setattr(session, "_new_call", lambda *arguments: MeasuredCall(metrics, *arguments))
        yield session


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def double(call: Call) -> None:
    x = call.input("X")
    np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())


def test_a_call_is_counted_with_its_time_and_bytes(session: ShmSession, metrics: Metrics, client: Client) -> None:
    session.serve([client.request({"X": X}, {"Y": 16})], double)
    assert metrics.told == ["time", ("direct", 32, 0)]


def test_what_is_copied_counts_as_such(session: ShmSession, metrics: Metrics, client: Client) -> None:
    def infer(call: Call) -> None:
        call.put("Y", np.ones(4, np.float32))
        double(call) if call.parameters else None
        call.put("Z", np.ones(2, np.float32))

    session.serve([client.request({"X": X}, {"Y": 16, "Z": 4}, delivered={"W": X})], infer)
    assert metrics.told == ["time", ("direct", 16, 16 + 16 + 8)]


def test_what_triton_delivers_was_copied(session: ShmSession, metrics: Metrics) -> None:
    session.serve([delivered({}, ["Y"], {"X": X})], double)
    assert metrics.told == ["time", ("triton", 0, 32)]


def test_a_call_that_is_refused_is_a_refusal(session: ShmSession, metrics: Metrics, client: Client) -> None:
    session.serve([client.request({}, {"Y": 16})], double)
    (kind,) = metrics.told
    assert kind.__name__ == "MissingTensorError"


def test_a_call_that_fails_is_a_refusal_and_no_answer(session: ShmSession, metrics: Metrics, client: Client) -> None:
    session.serve([client.request({"X": X}, {"Y": 16})], lambda call: None)
    assert metrics.told == [ModelError]


def test_a_call_that_a_gpu_works_for_is_counted_when_it_has_ended(
    session: ShmSession, metrics: Metrics, client: Client
) -> None:
    def infer(call: Call) -> None:
        double(call)
        call.ready_on(0)

    session.serve([client.request({"X": X}, {"Y": 16})], infer)
    assert metrics.told == ["time", ("direct", 32, 0)]


def test_a_call_whose_gpu_fails_is_a_refusal(session: ShmSession, metrics: Metrics, client: Client) -> None:
    def infer(call: Call) -> None:
        double(call)
        call.ready_on(0)
        DRIVER.fail_next("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", process=MODEL)

    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], infer)
    assert error_code(response) == "UNAVAILABLE"
    (kind,) = metrics.told
    assert issubclass(kind, MachineError)


def test_a_call_outside_of_serve_is_counted_once(session: ShmSession, metrics: Metrics, client: Client) -> None:
    with session.open(client.request({"X": X}, {"Y": 16})) as call:
        double(call)
    assert metrics.told == ["time", ("direct", 32, 0)]
    del metrics.told[:]
    with pytest.raises(ValueError, match="no"), session.open(client.request({"X": X}, {"Y": 16})):
        raise ValueError("no")
    assert metrics.told == [ValueError]


def test_a_session_with_shm_debug_counts_as_well(
    session: ShmSession, metrics: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_new_call", lambda *arguments: MeasuredDebugCall(metrics, *arguments))
    session.serve([client.request({"X": X}, {"Y": 16})], double)
    assert metrics.told == ["time", ("direct", 32, 0)]
    del metrics.told[:]
    session.serve([client.request({"X": X}, {"Y": 16})], lambda call: call.output("Y", (4,), np.float32))
    assert metrics.told == [ModelError]
