"""A model answers while its GPU works: the user's stream waits for ``completed``, or the host polls it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, ShmClient
from shm_backend_utils.errors import PeerError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory import locks
from tests.unit.gpu.client.conftest import ON_GPU, PLACE, X, address_of, doubled, now, wait_until
from tests.unit.gpu.client.gpu_server import PROCESS, GpuServer
from tests.unit.gpu.client.test_waiting_for_gpus import DIED
from tests.unit.gpu.fakes import DRIVER, captured, held_back, in_forked_child

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


def test_a_stream_goes_on_although_memory_is_freed_meanwhile(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
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


def test_a_prepared_call_whose_model_died_is_over(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
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


def test_a_stream_that_waits_outlives_its_client(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
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


def test_a_number_that_runs_backwards_lets_the_stream_go_on(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    early.completes = lambda generation: generation - 1
    client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream).release()
    begin = time.monotonic()
    runtime.synchronize_stream(stream, 0)
    assert time.monotonic() - begin < SOON_S
    early.answers_early = False
    np.testing.assert_array_equal(doubled(client, X), 2 * X)


def test_a_forked_child_neither_waits_nor_writes(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    with held_back(early.own_stream, PROCESS):
        result = client.infer("m", {"IN0": X}, outputs=ON_GPU, cuda_stream=stream)
        in_forked_child(client._memory.bank.collect)
        time.sleep(0.1)
        assert not is_done(runtime, stream)
    runtime.synchronize_stream(stream, 0)
    np.testing.assert_array_equal(now(address_of(result)), 2 * X)


def test_records_are_registered_once_and_not_for_ever(
    early: GpuServer, client: ShmClient, runtime: CudaRuntime, stream: int
) -> None:
    for number in range(3):
        client.infer("m", {"IN0": number * X}, outputs=ON_GPU, cuda_stream=stream).release()
        runtime.synchronize_stream(stream, 0)
    assert (DRIVER.count("cuMemHostRegister", 0), DRIVER.live(0).pinned) == (1, 1)
    client.close()
    wait_until(lambda: (client._memory.bank.collect(), DRIVER.live(0).pinned)[1] == 0)
