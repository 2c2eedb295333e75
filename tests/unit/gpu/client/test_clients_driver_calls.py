"""How many calls of CUDA's driver a client makes for a request, when its memory, streams and events are there."""

from __future__ import annotations

import contextlib

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.client.conftest import ON_GPU, PLACE, X, gpu_client, tensor_of
from tests.unit.gpu.client.gpu_server import PROCESS, GpuServer
from tests.unit.gpu.fakes import held_back, recorded_calls

RELAXED = "cuThreadExchangeStreamCaptureMode"
COMES_AFTER = (
    *("cuCtxPushCurrent", "cuStreamGetCtx", "cuStreamIsCapturing", "cuEventRecord"),
    *(RELAXED, "cuEventQuery", RELAXED, "cuCtxPopCurrent"),
)
"""The request comes after the work on the named stream, which the host waits for."""
LETS_WAIT = ("cuCtxPushCurrent", "cuStreamIsCapturing", "cuStreamWaitValue64", "cuCtxPopCurrent")


@pytest.mark.parametrize("is_early", [False, True], ids=["after the GPU", "SHM_GPU_EVENTS"])
def test_a_prepared_call_on_a_named_stream(
    server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int, is_early: bool
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early = is_early
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        for _ in range(3):
            works = held_back(server.own_stream, PROCESS) if is_early else contextlib.nullcontext()
            with works, recorded_calls(runtime) as calls:
                call.infer(cuda_stream=stream).release()
            runtime.synchronize_stream(stream, 0)
    assert calls == [*COMES_AFTER, *(LETS_WAIT if is_early else ())]


@pytest.mark.parametrize(("is_lent", "most"), [(True, 29), (False, 24)])
def test_a_tensor_of_the_users(
    server: GpuServer, runtime: CudaRuntime, stream: int, cuda: CudaAccess, is_lent: bool, most: int
) -> None:
    x = tensor_of(X)
    with gpu_client(server, cuda, lend_bytes=0 if is_lent else 2**30) as client:
        for _ in range(3):
            with recorded_calls(runtime) as calls:
                client.infer("m", {"IN0": x}, outputs=ON_GPU, cuda_stream=stream).release()
    assert len(calls) <= most, " ".join(calls)
