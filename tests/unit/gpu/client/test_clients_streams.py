"""Work of the user's on GPUs that a call comes behind: what is late would be wrong if nobody waited for it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.errors import CallerError, ClosedError
from shm_backend_utils.gpu.runtime import CudaRuntime
from tests.unit.gpu.client.conftest import ON_GPU, ON_HOST, PLACE, X, address_of, doubled, now, on_host, tensor_of
from tests.unit.gpu.client.gpu_server import PROCESS, GpuServer
from tests.unit.gpu.fakes import DRIVER, held_back, in_another_thread, stream_on

LATE_S = 0.1


def put_late(stream: int, function: Callable[[], object]) -> None:
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    DRIVER.launch(stream, function)


def written_late(stream: int, **options: Any) -> Any:
    """Return a tensor that is written on a stream, late; and no library knows."""
    tensor = tensor_of(np.zeros_like(X), **options)
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    tensor.write(X, stream)
    tensor.stream = None
    return tensor


@pytest.fixture
def event(runtime: CudaRuntime) -> Iterator[Any]:
    handle = runtime.create_event(0)
    yield type("Event", (), {"ptr": handle})()
    runtime.destroy_event(handle, 0)


@pytest.mark.parametrize("kind", ["device", "pool"], ids=["lent", "copied"])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_late_work_is_waited_for(server: GpuServer, client: ShmClient, stream: int, kind: str, is_named: bool) -> None:
    x = written_late(stream, kind=kind)
    named = SimpleNamespace(__cuda_stream__=lambda: (0, stream)) if is_named else None
    np.testing.assert_array_equal(doubled(client, x, cuda_stream=named), 2 * X)
    np.testing.assert_array_equal(server.inputs["IN0"], X)


def test_events_are_named(server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int, event: Any) -> None:
    x = written_late(stream)
    with runtime.on(0):
        runtime.record(event.ptr, stream)
    client.infer("m", {"IN0": x}, outputs=ON_HOST, cuda_stream=event)
    np.testing.assert_array_equal(server.inputs["IN0"], X)


def test_a_librarys_own_stream_counts(server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    x = tensor_of(X)
    DRIVER.launch(stream, lambda: time.sleep(LATE_S))
    x.write(2 * X, stream)
    with stream_on(runtime) as idle:
        client.infer("m", {"IN0": x}, outputs=ON_HOST, cuda_stream=idle)
    np.testing.assert_array_equal(server.inputs["IN0"], 2 * X)


@pytest.mark.parametrize("before", ["stream", "event", "nothing"])
def test_an_earlier_result_is_read_before_another_thread_has_its_memory_written(
    client: ShmClient, runtime: CudaRuntime, stream: int, event: Any, before: str
) -> None:
    named = {"stream": stream, "event": event, "nothing": None}[before]
    result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=named)
    address, read = address_of(result), []
    put_late(stream, lambda: read.append(now(address).copy()))
    result.release()
    with stream_on(runtime) as another:
        again = in_another_thread(lambda: client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=another))
    assert address_of(again) == address
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(read[0], 2 * X)


def test_the_same_stream_waits_for_nothing_else(client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream).release()
    with stream_on(runtime) as busy, held_back(busy, process=0):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream, timeout_s=2).release()


@pytest.mark.parametrize("stream", ["fast", -5], ids=str)
def test_what_is_no_stream_is_refused_with_and_without_gpus(client: ShmClient, stream: object) -> None:
    with pytest.raises(CallerError, match=r"stream|expected"):
        client.infer("m", {"IN0": X}, cuda_stream=stream)


def test_a_late_stream_ends_the_call_in_time(server: GpuServer, client: ShmClient, stream: int) -> None:
    x = tensor_of(X)
    client.infer("m", {"IN0": x}, outputs=ON_GPU).release()  # makes memory
    late = "its GPU was still at work on what comes before it"
    with held_back(stream, process=0), pytest.raises(DeadlineExceededError, match=late):
        client.infer("m", {"IN0": x}, outputs=ON_GPU, cuda_stream=stream, timeout_s=0.1)
    assert len(server.orders) == 1
    np.testing.assert_array_equal(doubled(client, x, cuda_stream=stream), 2 * X)


def test_outputs_follow_the_stream(server: GpuServer, client: ShmClient, stream: int, runtime: CudaRuntime) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()  # makes memory
    server.answers_early, read = True, []
    with held_back(server.own_stream, process=PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        address = address_of(result)
        DRIVER.launch(stream, lambda: read.append(now(address).copy()))
        assert read == []
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(read[0], 2 * X)
    result.release()


def test_what_is_submitted_on_a_threads_own_stream_is_ready(server: GpuServer, client: ShmClient) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early, server.work_s = True, LATE_S
    result = client.submit("m", {"IN0": 3 * X}, outputs=ON_GPU, cuda_stream=2).result()
    np.testing.assert_array_equal(now(address_of(result)), 6 * X)


def test_memory_is_not_used_while_a_model_works(server: GpuServer, client: ShmClient, stream: int) -> None:
    server.answers_early, server.work_s = True, 0.3
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream).release()
    server.work_s = 0.0
    np.testing.assert_array_equal(doubled(client, 5 * X), 10 * X)


def test_a_closed_call_takes_no_stream(client: ShmClient, stream: int) -> None:
    call = client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU)
    call.close()
    with pytest.raises(ClosedError):
        call.inputs_ready(stream)


@pytest.mark.parametrize("way", ["inputs_ready", "infer", "neither"])
def test_a_prepared_call_comes_behind_what_is_named(client: ShmClient, stream: int, way: str) -> None:
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        array: Any = call.inputs["IN0"]
        memory = now(array.address)
        del array
        for times in (1, 2):
            put_late(stream, functools.partial(np.copyto, memory, times * X))
            if way == "inputs_ready":
                call.inputs_ready(stream)
            result = call.infer(cuda_stream=stream if way == "infer" else None)
            np.testing.assert_array_equal(on_host(result), 2 * times * X)


def test_names_are_for_one_request(server: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int) -> None:
    x = tensor_of(X)
    with stream_on(runtime) as idle, client.prepare("m", {"IN0": x}, outputs=ON_HOST) as call:
        call.inputs_ready(idle)
        call.infer()
        put_late(stream, functools.partial(np.copyto, x.peek(), 3 * X))
        call.infer()
        np.testing.assert_array_equal(server.inputs["IN0"], 3 * X)
