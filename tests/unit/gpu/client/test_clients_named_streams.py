"""Streams that a client names: beside captures of graphs, and for whom a model answers while its GPU works."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.errors import CallerError, PeerError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory import locks
from tests.unit.gpu.client.conftest import (
    ON_GPU,
    ON_HOST,
    PLACE,
    X,
    address_of,
    doubled,
    gpu_client,
    now,
    on_host,
    tensor_of,
    wait_until,
)
from tests.unit.gpu.client.gpu_server import PROCESS, GpuServer
from tests.unit.gpu.client.test_waiting_for_gpus import DIED
from tests.unit.gpu.fakes import (
    DRIVER,
    MODES,
    OwnedStream,
    captured,
    captured_elsewhere,
    held_back,
    in_forked_child,
    recorded_calls,
    stream_on,
)

REFUSED = "this call names no stream, .* name the call's streams by cuda_stream, or capture no graph meanwhile"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_who_names_its_streams_ends_no_capture(server: GpuServer, cuda: CudaAccess, stream: int, mode: str) -> None:
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
    "call", [lambda client: client.infer("m", {"IN0": X}, outputs=ON_GPU), call_prepared], ids=["infer", "prepared"]
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


def test_a_named_stream_in_capture_is_refused_and_its_capture_goes_on(
    server: GpuServer, client: ShmClient, stream: int
) -> None:
    with captured(stream), pytest.raises(CallerError, match="a stream that cuda_stream names is being captured"):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
    assert server.orders == []


def test_if_the_driver_refuses_the_call_the_reason_is_the_same(client: ShmClient) -> None:
    for name, error, text in (
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", CallerError, REFUSED),
        ("CUDA_ERROR_INVALID_VALUE", CudaError, "CUDA_ERROR_INVALID_VALUE"),
    ):
        DRIVER.fail_next("cuCtxRecordEvent", name)
        with pytest.raises(error, match=text):
            client.infer("m", {"IN0": X}, outputs=ON_GPU)


def test_a_stream_of_another_call_is_waited_for_alone(client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
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


def test_a_stream_of_another_call_may_be_captured_now(client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    own = OwnedStream(runtime)
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=own).release()
    with captured(own.handle):
        DRIVER.fail_next("cuMemAlloc", "CUDA_ERROR_LAUNCH_FAILED", process=0)  # which waits for the GPU
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
            client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
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


# A model answers while its GPU works: the stream waits for `completed`, or the host polls it

SOON_S = 1.0


@pytest.fixture
def early(server: GpuServer, client: ShmClient) -> GpuServer:
    """A server that answers early, and whose client has memory."""
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early = True
    return server


def is_done(runtime: CudaRuntime, stream: int) -> bool:
    with runtime.on(0):
        return runtime.is_stream_done(stream)


@pytest.mark.parametrize("maps_it", [False, True], ids=["nobody else maps the memory", "another model maps it"])
def test_a_stream_goes_on_if_the_model_dies_and_the_memory_is_not_used_again(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int, maps_it: bool
) -> None:
    (left,) = early.claims
    (region,) = idle_regions(client)
    with held_back(early.own_stream, PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        others = locks.use(region.fd) if maps_it else None
        time.sleep(0.1)
        assert not is_done(runtime, stream)
        early.die()
        died = time.monotonic()
        runtime.synchronize_stream(stream, 0)
        assert time.monotonic() - died < SOON_S
        result.release()
        early.answers_early = False
    np.testing.assert_array_equal(doubled(client, X, cuda_stream=stream), 2 * X)
    assert early.claims[0] != left
    if others is not None:
        others.give_back()


def test_freed_memory_lets_a_stream_go(early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    """To free memory waits for the stream, which waits for the model."""
    with held_back(early.own_stream, PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        runtime.retired.add(functools.partial(runtime.free, runtime.allocate(1, 0), 0))
        frees = DRIVER.count("cuMemFree", 0)
        wait_until(lambda: DRIVER.count("cuMemFree", 0) > frees)
        early.die()
        died = time.monotonic()
        wait_until(lambda: is_done(runtime, stream))
        assert time.monotonic() - died < SOON_S
        result.release()


def idle_regions(client: ShmClient) -> list[Any]:
    shelves = client._memory.pool._inventory.shelves
    return [region for shelf in shelves.values() for _, regions in shelf for region in regions]


def test_a_dead_models_prepared_call(early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        with held_back(early.own_stream, PROCESS):
            call.infer(cuda_stream=stream).release()
            early.die()
            runtime.synchronize_stream(stream, 0)
        sent = len(early.orders)
        for _ in range(2):
            with pytest.raises(PeerError, match=DIED):
                call.infer(cuda_stream=stream)
        assert len(early.orders) == sent


def test_a_stream_outlives_its_client(early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    with held_back(early.own_stream, PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        address = address_of(result)
        client.close()
        assert not is_done(runtime, stream)
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(now(address), 2 * X)
    del result


LACKING = {
    "cuDeviceGetAttribute": "CUDA_ERROR_INVALID_VALUE",
    "cuMemHostRegister": "CUDA_ERROR_NOT_PERMITTED",
    "cuStreamWaitValue64": "CUDA_ERROR_NOT_SUPPORTED",
}


@pytest.mark.parametrize("function", LACKING)
def test_the_host_polls_if_no_stream_can_wait(early: GpuServer, client: ShmClient, stream: int, function: str) -> None:
    early.work_s = 0.1
    DRIVER.fail_next(function, LACKING[function], times=9, process=0)
    result = client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=stream)
    np.testing.assert_array_equal(now(address_of(result)), 6 * X)


def test_the_host_polls_without_cuda_if_no_stream_is_named(early: GpuServer, client: ShmClient) -> None:
    asked: list[int] = []

    def count(_: object) -> None:
        asked.append(DRIVER.count("cuCtxPushCurrent", 0))

    early.after, early.work_s = count, 0.1
    result = client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU)
    count(None)
    assert asked[0] == asked[1]
    np.testing.assert_array_equal(now(address_of(result)), 6 * X)


def test_a_stream_in_capture_is_left_alone(early: GpuServer, client: ShmClient, stream: int) -> None:
    capture = captured(stream)
    early.after, early.work_s = lambda _: capture.__enter__(), 0.1
    result = client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=stream)
    np.testing.assert_array_equal(now(address_of(result)), 6 * X)
    assert DRIVER.count("cuStreamWaitValue64", 0) == 0
    capture.__exit__(None, None, None)  # it is valid


@pytest.mark.parametrize(
    ("completes", "error", "text"),
    [
        (lambda generation: generation - 1, PeerError, DIED),
        (None, DeadlineExceededError, "a model's GPU was still at work in its memory"),
    ],
    ids=["runs backwards", "is never written"],
)
def test_a_number_that_does_not_come_ends_the_call_in_time(
    early: GpuServer, client: ShmClient, completes: Callable[[int], int] | None, error: Any, text: str
) -> None:
    early.completes, begin = completes, time.monotonic()
    with pytest.raises(error, match=text):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, timeout_s=0.2)
    assert time.monotonic() - begin < SOON_S
    early.die()
    early.answers_early = False
    np.testing.assert_array_equal(doubled(client, X), 2 * X)


def test_a_number_that_runs_backwards(early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    early.completes = lambda generation: generation - 1
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream).release()
    begin = time.monotonic()
    runtime.synchronize_stream(stream, 0)
    assert time.monotonic() - begin < SOON_S
    early.answers_early = False
    np.testing.assert_array_equal(doubled(client, X), 2 * X)


def test_a_forked_child_does_nothing(early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    with held_back(early.own_stream, PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        in_forked_child(client._memory.bank.collect)
        time.sleep(0.1)
        assert not is_done(runtime, stream)
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(now(address_of(result)), 2 * X)
