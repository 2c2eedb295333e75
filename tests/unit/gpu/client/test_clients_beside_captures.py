"""A client beside graph captures of its process, which it ends only if it names no stream; the calls that it makes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import CallerError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.client.conftest import (
    ON_GPU,
    ON_HOST,
    PLACE,
    X,
    address_of,
    doubled,
    gpu_client,
    on_host,
    tensor_of,
    wait_until,
)
from tests.unit.gpu.client.gpu_server import PROCESS, GpuServer
from tests.unit.gpu.fakes import DRIVER, MODES, captured, captured_elsewhere, held_back, recorded_calls, stream_on

REFUSED = "this call names no stream, .* name the call's streams by cuda_stream, or capture no graph meanwhile"


class OwnedStream:
    """A stream of a library, which goes with its object."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.handle = runtime.create_stream(0)
        self._runtime = runtime

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __del__(self) -> None:
        self._runtime.destroy_stream(self.handle, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_a_client_that_names_its_streams_ends_no_capture(
    server: GpuServer, cuda: CudaAccess, stream: int, mode: str
) -> None:
    tensors = [tensor_of(X, kind=kind) for kind in ("device", "pool")]
    with stream_on(cuda.runtime) as other, gpu_client(server, cuda, lend_bytes=0) as client:
        client.infer("m", {"IN0": X}, outputs=ON_GPU).release()  # another call has the memory next
        with captured_elsewhere(mode):
            for x in tensors:
                for named in (stream, other):
                    result = client.infer("m", {"IN0": x}, outputs=ON_GPU, cuda_stream=named)
                    copied: Any = result.copy()["OUT0"]
                    np.testing.assert_array_equal(on_host(result), 2 * X)
                    np.testing.assert_array_equal(copied.to_host(), 2 * X)
                    del result, copied
            client.infer("m", {"IN0": tensors[0]}, outputs=ON_HOST, path="inline", cuda_stream=stream).release()
            with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
                for _ in range(2):
                    call.inputs_ready(stream)
                    call.infer().release()
            client.close()
            server.sweep()
            gc.collect()
            wait_until(lambda: not client._memory.bank.collect())


def call_prepared(client: ShmClient) -> None:
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        call.infer()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "call",
    [lambda client: client.infer("m", {"IN0": X}, outputs=ON_GPU), call_prepared],
    ids=["infer", "prepared"],
)
def test_a_call_without_streams_is_refused_and_the_capture_goes_on(
    server: GpuServer, client: ShmClient, runtime: CudaRuntime, call: Callable[[ShmClient], Any], is_old: bool
) -> None:
    runtime._version = 12040 if is_old else runtime._version
    bindings = DRIVER.bindings()
    with bindings.context(0):
        blocking = int(bindings.cuStreamCreate(0)[1])
    with captured(blocking), pytest.raises(CallerError, match=REFUSED):
        call(client)
    assert server.orders == []
    np.testing.assert_array_equal(doubled(client, X), 2 * X)
    runtime.destroy_stream(blocking, 0)


def test_if_the_driver_refuses_the_call_the_reason_is_the_same(client: ShmClient) -> None:
    DRIVER.fail_next("cuCtxRecordEvent", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    with pytest.raises(CallerError, match=REFUSED):
        client.infer("m", {"IN0": X}, outputs=ON_GPU)


def test_a_stream_that_another_call_named_is_waited_for_alone(
    client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    own = OwnedStream(runtime)
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=own)
    address, order = address_of(result), list[str]()
    with held_back(own.handle, process=0) as finish, stream_on(runtime) as busy, held_back(busy, process=0):
        DRIVER.launch(own.handle, lambda: order.append("read"))
        result.release()
        del own
        gc.collect()
        finish.set()
        again = client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=stream, timeout_s=5)
        assert (address_of(again), order) == (address, ["read"])


def test_a_stream_of_another_call_that_is_captured_now_does_not_matter(
    client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    own = OwnedStream(runtime)
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=own).release()
    with captured(own.handle):
        np.testing.assert_array_equal(doubled(client, X, cuda_stream=stream), 2 * X)


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
