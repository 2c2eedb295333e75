"""How many calls of CUDA's driver a model makes for a request, when its mappings, streams and events are there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call
from tests.unit.gpu.fakes import recorded_calls
from tests.unit.gpu.model.conftest import DEVICE, Calls, Client, calls_of

RELAXED = "cuThreadExchangeStreamCaptureMode"
READY_ON = ("cuCtxPushCurrent", "cuStreamGetCtx", "cuStreamIsCapturing", "cuCtxPopCurrent")
ENDS = {
    False: (
        *("cuCtxPushCurrent", "cuStreamIsCapturing", "cuEventRecord"),
        *(RELAXED, "cuEventSynchronize", RELAXED, "cuCtxPopCurrent"),
    ),
    True: (
        *("cuCtxPushCurrent", "cuStreamIsCapturing", "cuEventRecord"),
        *("cuStreamWaitEvent", "cuStreamWriteValue64", "cuCtxPopCurrent"),
    ),
}
"""By whether the answer leaves before the GPU is done."""


@pytest.fixture(params=[False, True], ids=["after the GPU", "SHM_GPU_EVENTS"])
def is_early(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def calls(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch, is_early: bool) -> Iterator[Calls]:
    with calls_of(cuda, client, monkeypatch, gpu_events=is_early) as calls:
        yield calls


def test_a_call_that_names_its_stream(calls: Calls, is_early: bool) -> None:
    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        call.input("X")
        call.output("Y", (4,), np.float32)

    for _ in range(3):
        with recorded_calls(calls.cuda) as found:
            calls.serve(infer, {"Y": DEVICE})
        assert bool(calls.client.events()) == is_early
        calls.client.wait_for_gpus()
        calls.collect()
    assert found == [*READY_ON, *ENDS[is_early]]


def test_a_copy_to_the_gpu(calls: Calls) -> None:
    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        call.to_device(call.input("X")).let_wait(calls.stream, DEVICE)

    for _ in range(3):
        request = calls.client.host.request({"X": np.ones(4, np.float32)}, {})
        with recorded_calls(calls.cuda) as found:
            (response,) = calls.session.serve([request], infer)
        assert response.error() is None
    assert len(found) <= 39, " ".join(found)
