"""Batches whose rows are on a GPU: brought together, computed and taken apart there; nothing comes to the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model import BatchCall, ShmSession
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors.cuda.device_array import DeviceArray
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.calls_on_gpus.device_calls import SLOTS, Client
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import delivered
from tests.unit.fake_gpu import DRIVER, kernel, stream_on
from tests.unit.sessions import session_of, tensor

FP32 = BY_NAME["FP32"]
SHARE = 4096


@pytest.fixture(params=[{}, {"SHM_GPU_EVENTS": "true"}, {"SHM_DEBUG": "true"}], ids=["", "events", "debug"])
def session(
    request: pytest.FixtureRequest, cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ShmSession]:
    access = CudaAccess(lambda: cuda)
    inputs, outputs = [tensor("X", dims=[4]), tensor("SHM", "UINT8")], [tensor("Y", dims=[4])]
    with session_of(monkeypatch, inputs, outputs, cuda=access, parameters=request.param, max_batch_size=8) as session:
        yield session


def row_of(client: Client, slot: int, output_device: int) -> InferenceRequest:
    """Return a request of one row, which does not lie beside that of the next slot."""
    claims = tuple(claim_of_allocation(each) for each in client.allocations)
    begin = slot * SHARE
    said = Table(
        {"X": InputSpan(FP32, (1, 4), 1, begin, 16)}, {"Y": OutputSpan(1 + output_device, begin + 512, 16)}, claims
    )
    return delivered(client.host.begin(said, slot), ["Y"], {"SHM": np.empty((1, 0), np.uint8)})


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_a_batch_stays_on_the_gpu_that_its_rows_are_on(
    client: Client, session: ShmSession, stream: int, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    copied: list[Any] = []
    copy = CudaRuntime.copy

    def look(runtime: CudaRuntime, target: int, source: int, byte_size: int, on: int) -> None:
        with runtime.on(0):
            copied.append((runtime.pointer(target).kind, runtime.pointer(source).kind, byte_size))
        copy(runtime, target, source, byte_size, on)

    def infer(batch: BatchCall) -> None:
        if is_named:
            batch.ready_on(stream)
        x, y = batch.input("X"), batch.output("Y", (4,), np.float32)
        assert isinstance(x.array, DeviceArray)
        assert isinstance(y.array, DeviceArray)
        assert (x.shape, y.shape) == ((SLOTS, 4), (SLOTS, 4))
        kernel(stream, lambda x, y: np.multiply(x, 2, out=y), x.array, y.array, late_s=0.02)

    monkeypatch.setattr(CudaRuntime, "copy", look)
    for slot in range(SLOTS):
        client.write(slot, slot + 1)
    responses = session.serve_batch([row_of(client, slot, 0) for slot in range(SLOTS)], infer)
    assert [response.error() for response in responses] == [None] * SLOTS
    for slot in range(SLOTS):
        client.wait_for_events(slot)
    assert [client.output(slot, "Y") for slot in range(SLOTS)] == [[2 * slot + 2] * 4 for slot in range(SLOTS)]
    assert copied == [("device", "device", 16)] * (2 * SLOTS)


def test_an_array_of_all_rows_is_given_row_by_row(cuda: CudaRuntime, client: Client, session: ShmSession) -> None:
    with stream_on(cuda) as stream:

        def infer(batch: BatchCall) -> None:
            rows = np.arange(SLOTS, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
            batch.put("Y", DRIVER.tensor(rows, stream=stream))

        responses = session.serve_batch([row_of(client, slot, 0) for slot in range(SLOTS)], infer)
        assert [response.error() for response in responses] == [None] * SLOTS
        assert [client.output(slot, "Y") for slot in range(SLOTS)] == [[slot] * 4 for slot in range(SLOTS)]
