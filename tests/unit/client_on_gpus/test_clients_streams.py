"""Work of the user's on GPUs that a call comes behind: what is late would be wrong if nobody waited for it."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.client_on_gpus.conftest import on_host, tensor_of
from tests.unit.client_on_gpus.gpu_server import PROCESS, GpuServer
from tests.unit.fake_gpu import held_back, stream_on

X = np.arange(600, dtype=np.float32)
ON_GPU = {"OUT0": (X.shape, X.dtype, "cuda:0")}
ON_HOST = {"OUT0": X.nbytes}
LATE_S = 0.1


class Stream:
    """A stream by CUDA's protocol in Python."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@pytest.fixture
def runtime(driver: FakeDriver) -> CudaRuntime:
    """CUDA as the user has it."""
    runtime: CudaRuntime = driver.runtime()
    return runtime


@pytest.fixture
def stream(runtime: CudaRuntime) -> Iterator[int]:
    with stream_on(runtime) as stream:
        yield stream


def written_late(driver: FakeDriver, stream: int, **options: Any) -> Any:
    """Return a tensor that is written on a stream, late; and no library knows."""
    tensor = tensor_of(driver, np.zeros_like(X), **options)
    driver.launch(stream, lambda: time.sleep(LATE_S))
    tensor.write(X, stream)
    tensor.stream = None
    return tensor


@pytest.mark.parametrize("kind", ["device", "pool"], ids=["lent", "copied"])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_what_is_written_late_is_waited_for(
    driver: FakeDriver, server: GpuServer, client: ShmClient, stream: int, kind: str, is_named: bool
) -> None:
    x = written_late(driver, stream, kind=kind)
    result = client.infer("m", {"IN0": x}, outputs=ON_GPU, stream=Stream(stream) if is_named else None)
    np.testing.assert_array_equal(on_host(result), 2 * X)
    np.testing.assert_array_equal(server.seen.inputs["IN0"], X)


@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@pytest.mark.parametrize("kind", ["device", "pool"], ids=["lent", "copied"])
def test_without_that_wait_it_would_be_wrong(
    driver: FakeDriver, server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int, kind: str
) -> None:
    with stream_on(runtime) as idle, held_back(stream, process=0):
        x = written_late(driver, stream, kind=kind)
        client.infer("m", {"IN0": x}, outputs=ON_GPU, stream=idle)
        assert not server.seen.inputs["IN0"].any()
    runtime.synchronize_stream(stream, 0)  # it writes to x


def test_an_event_is_named_as_a_stream_is(
    driver: FakeDriver, server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    class Event:
        ptr = runtime.create_event(0)

    x = written_late(driver, stream)
    with runtime.on(0):
        runtime.record(Event.ptr, stream)
    client.infer("m", {"IN0": x}, outputs=ON_HOST, stream=Event())
    np.testing.assert_array_equal(server.seen.inputs["IN0"], X)
    runtime.destroy_event(Event.ptr, 0)


def test_what_the_library_says_of_its_stream_is_heeded(
    driver: FakeDriver, server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    x = tensor_of(driver, X)
    driver.launch(stream, lambda: time.sleep(LATE_S))
    x.write(2 * X, stream)
    with stream_on(runtime) as idle:
        client.infer("m", {"IN0": x}, outputs=ON_HOST, stream=idle)
    np.testing.assert_array_equal(server.seen.inputs["IN0"], 2 * X)


@pytest.mark.parametrize("before", ["stream", "event", "nothing"])
def test_an_earlier_result_is_read_before_another_thread_has_its_memory_written(
    driver: FakeDriver, client: ShmClient, runtime: CudaRuntime, stream: int, before: str
) -> None:
    class Event:
        ptr = runtime.create_event(0)

    named = {"stream": stream, "event": Event(), "nothing": None}[before]
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU, stream=named)
    array: Any = result["OUT0"]
    address, read = array.address, []
    driver.launch(stream, lambda: time.sleep(LATE_S))
    driver.launch(stream, lambda: read.append(driver.memory(address, X.shape, X.dtype).copy()))
    del array
    result.release()
    with stream_on(runtime) as another, concurrent.futures.ThreadPoolExecutor(1) as thread:
        again: Any = thread.submit(client.infer, "m", {"IN0": 3 * X}, outputs=ON_GPU, stream=another).result()["OUT0"]
    assert again.address == address
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(read[0], 2 * X)
    runtime.destroy_event(Event.ptr, 0)


def test_who_names_the_same_stream_again_waits_for_nothing_else(
    client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU, stream=stream).release()
    with stream_on(runtime) as busy, held_back(busy, process=0):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, stream=stream, timeout_s=2).release()


@pytest.mark.parametrize("stream", ["fast", -5], ids=str)
def test_what_is_no_stream_is_refused_with_and_without_gpus(client: ShmClient, stream: object) -> None:
    with pytest.raises(CallerError, match=r"stream|expected"):
        client.infer("m", {"IN0": X}, stream=stream)


def test_a_late_user_has_his_call_end_in_time_and_its_memory_kept(
    driver: FakeDriver, server: GpuServer, client: ShmClient, stream: int
) -> None:
    x = tensor_of(driver, X, kind="device")
    late = "its GPU was still at work on what comes before it"
    with held_back(stream, process=0), pytest.raises(DeadlineExceededError, match=late):
        client.infer("m", {"IN0": x}, outputs=ON_GPU, stream=stream, timeout_s=0.1)
    assert not server.orders
    np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU, stream=stream)), 2 * X)


# Outputs


def test_on_a_named_stream_outputs_are_waited_for_there(
    driver: FakeDriver, server: GpuServer, client: ShmClient, stream: int, runtime: CudaRuntime
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()  # makes memory
    server.answers_early, read = True, []
    with held_back(server.own_stream, process=PROCESS):
        result: Any = client.infer("m", {"IN0": X}, outputs=ON_GPU, stream=stream)["OUT0"]
        address = result.address
        driver.launch(stream, lambda: read.append(driver.memory(address, X.shape, X.dtype).copy()))
        assert read == []
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(read[0], 2 * X)


def test_what_is_submitted_on_a_threads_own_stream_is_ready_with_its_result(
    driver: FakeDriver, server: GpuServer, client: ShmClient
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early, server.work_s = True, LATE_S
    result: Any = client.submit("m", {"IN0": 3 * X}, outputs=ON_GPU, stream=2).result()["OUT0"]
    np.testing.assert_array_equal(driver.memory(result.address, X.shape, X.dtype), 6 * X)


def test_memory_where_a_models_gpu_is_still_at_work_is_not_used_before_it_has_done(
    server: GpuServer, client: ShmClient, stream: int
) -> None:
    server.answers_early, server.work_s = True, 0.3
    client.infer("m", {"IN0": X}, outputs=ON_GPU, stream=stream).release()
    server.work_s = 0.0
    result = client.infer("m", {"IN0": 5 * X}, outputs=ON_GPU)
    np.testing.assert_array_equal(on_host(result), 10 * X)


# Prepared calls


def test_a_closed_call_takes_no_stream(client: ShmClient, stream: int) -> None:
    call = client.prepare("m", {"IN0": (X.shape, X.dtype, "cuda:0")}, outputs=ON_GPU)
    call.close()
    with pytest.raises(ClosedError):
        call.inputs_ready(stream)


@pytest.mark.parametrize("way", ["inputs_ready", "infer", "neither"])
def test_a_prepared_call_comes_behind_what_is_named(
    driver: FakeDriver, client: ShmClient, stream: int, way: str
) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype, "cuda:0")}, outputs=ON_GPU) as call:
        array: Any = call.inputs["IN0"]
        address = array.address
        for times in (1, 2):
            driver.launch(stream, lambda: time.sleep(LATE_S))

            def fill(times: int = times) -> None:
                driver.memory(address, X.shape, X.dtype)[:] = times * X

            driver.launch(stream, fill)
            if way == "inputs_ready":
                call.inputs_ready(stream)
            result = call.infer(stream=stream if way == "infer" else None)
            np.testing.assert_array_equal(on_host(result), 2 * times * X)
        del array


def test_what_is_named_for_one_request_is_not_for_the_next(
    driver: FakeDriver, server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    x = tensor_of(driver, X)
    with stream_on(runtime) as idle, client.prepare("m", {"IN0": x}, outputs=ON_HOST) as call:
        call.inputs_ready(idle)
        call.infer()
        driver.launch(stream, lambda: time.sleep(LATE_S))
        x.write(3 * X, stream)
        call.infer()
        np.testing.assert_array_equal(server.seen.inputs["IN0"], 3 * X)
