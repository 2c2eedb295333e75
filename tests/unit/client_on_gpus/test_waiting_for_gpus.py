"""Waiting for GPUs: it blocks no event loop, has the call's deadline, and ends when the model has died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import (
    AsyncShmClient,
    DeadlineExceededError,
    InferenceError,
    PoolOptions,
    ShmClient,
    SlotInDoubtError,
)
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.client_on_gpus.conftest import gpu_client, on_host, tensor_of, wait_until
from tests.unit.client_on_gpus.gpu_server import PROCESS, GpuServer
from tests.unit.fake_gpu import held_back, stream_on
from tests.unit.fake_wires import async_client_of

X = np.arange(600, dtype=np.float32)
ON_GPU = {"OUT0": (X.shape, X.dtype, "cuda:0")}
LATE_S = 0.3
DIED = "a model ended while its GPU was at work for this call, whose memory there is not used again"


async def check_that_the_loop_goes_on(
    server: GpuServer, cuda: CudaAccess, call: Callable[[AsyncShmClient], Any], stream: int, process: int
) -> None:
    """Make a call whose GPU is at work until another task of the event loop says that it may end."""
    async with async_client_of(server, cuda=cuda, pool=PoolOptions(lend_bytes=0)) as client:
        await call(client)  # makes memory
        with held_back(stream, process) as finish:
            asyncio.get_running_loop().call_later(0.02, finish.set)
            await call(client)
            assert finish.is_set(), "the event loop was blocked"
        bank = client._memory.bank
    server.sweep()
    wait_until(lambda: not bank.collect())


def test_a_model_that_leaves_work_to_its_gpu_blocks_no_event_loop(
    driver: FakeDriver, server: GpuServer, cuda: CudaAccess
) -> None:
    server.answers_early = True

    async def call(client: AsyncShmClient) -> None:
        result = await client.infer("m", {"IN0": X}, outputs=ON_GPU)
        array: Any = result["OUT0"]
        np.testing.assert_array_equal(driver.memory(array.address, X.shape, X.dtype), 2 * X)

    asyncio.run(check_that_the_loop_goes_on(server, cuda, call, server.own_stream, PROCESS))


@pytest.mark.parametrize(
    ("path", "kind", "is_named", "is_old"),
    [
        ("direct", "device", True, False),
        ("direct", "managed", False, False),
        ("direct", "device", False, True),
        ("inline", "device", True, False),
        ("inline", "managed", False, True),
    ],
)
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_a_user_who_is_late_blocks_no_event_loop(
    driver: FakeDriver, server: GpuServer, cuda: CudaAccess, path: Any, kind: str, is_named: bool, is_old: bool
) -> None:
    if is_old:
        cuda.runtime._version = 12040
    x = tensor_of(driver, X, kind=kind)
    with stream_on(driver.runtime()) as stream:

        async def call(client: AsyncShmClient) -> None:
            await client.infer("m", {"IN0": x}, outputs=ON_GPU, path=path, stream=stream if is_named else None)

        asyncio.run(check_that_the_loop_goes_on(server, cuda, call, stream, process=0))


def test_a_models_gpu_that_is_late_has_the_call_end_in_time(server: GpuServer, client: ShmClient) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early = True
    late = "a model's GPU was still at work in its memory"
    with held_back(server.own_stream, PROCESS), pytest.raises(DeadlineExceededError, match=late):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, timeout_s=0.1)
    np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": 3 * X}, outputs=ON_GPU)), 6 * X)


def test_a_model_that_dies_in_the_middle_leaves_memory_that_is_not_used_again(
    server: GpuServer, client: ShmClient
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    (left,) = server.seen.claims
    server.dies, server.work_s = True, LATE_S
    with pytest.raises(InferenceError, match="not healthy"):
        client.infer("m", {"IN0": X}, outputs=ON_GPU)
    server.dies, server.work_s = False, 0.0
    np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": X}, outputs=ON_GPU)), 2 * X)
    assert server.seen.claims[0].handle != left.handle


def test_a_model_that_dies_after_its_answer_is_not_waited_for_until_the_deadline(
    server: GpuServer, client: ShmClient
) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    server.answers_early, server.work_s = True, LATE_S
    server.after = lambda _: server.die()
    with pytest.raises(PeerError, match=DIED):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, timeout_s=20)
    server.after, server.answers_early, server.work_s = (lambda _: None), False, 0.0
    np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": X}, outputs=ON_GPU)), 2 * X)


def test_a_prepared_call_whose_model_died_says_so_ever_after(server: GpuServer, client: ShmClient) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype, "cuda:0")}, outputs=ON_GPU) as call:
        call.infer().release()
        server.dies, server.work_s = True, LATE_S
        with pytest.raises(InferenceError, match="not healthy"):
            call.infer()
        server.dies = False
        for _ in range(2):
            with pytest.raises(PeerError, match=f"{DIED}.*prepare another"):
                call.infer()


def test_so_does_one_whose_model_died_after_its_answer(
    driver: FakeDriver, server: GpuServer, client: ShmClient
) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype, "cuda:0")}, outputs=ON_GPU) as call:
        call.infer().release()
        server.answers_early = True
        server.after = lambda _: server.die()
        with held_back(server.own_stream, PROCESS), pytest.raises(PeerError, match=DIED):
            call.infer()
        server.runtime.synchronize_device(0)
        sent = len(server.orders)
        with pytest.raises(PeerError, match=f"{DIED}.*prepare another"):
            call.infer()
        assert len(server.orders) == sent


def test_a_gpu_that_is_late_is_waited_for_before_the_next_request_of_a_prepared_call(
    server: GpuServer, client: ShmClient
) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype)}, outputs=ON_GPU) as call:
        server.answers_early = True
        with held_back(server.own_stream, PROCESS):
            for _ in range(2):
                with pytest.raises(DeadlineExceededError, match="a model's GPU was still at work in its memory"):
                    call.infer(timeout_s=0.1)
            assert len(server.orders) == 1
        call.infer().release()


def test_a_request_without_an_answer_is_waited_for_before_the_next_of_a_prepared_call(
    driver: FakeDriver, server: GpuServer, client: ShmClient
) -> None:
    with client.prepare("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU) as call:
        with server.at_work_on_the_next():
            with pytest.raises(DeadlineExceededError):
                call.infer(timeout_s=1)
            with pytest.raises(SlotInDoubtError):
                call.infer(timeout_s=1)
        np.testing.assert_array_equal(on_host(call.infer()), 2 * X)


@pytest.mark.parametrize("events", [(1, 2), (0,), (1, 1)], ids=str)
def test_events_that_there_are_not_are_the_peers_fault(
    driver: FakeDriver, server: GpuServer, client: ShmClient, events: tuple[int, ...]
) -> None:
    x = tensor_of(driver, X)
    server.events = events
    with pytest.raises(PeerError, match="the model's results break the protocol: .*event"):
        client.infer("m", {"IN0": x}, outputs=ON_GPU)
    server.events = None
    np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU)), 2 * X)


@pytest.mark.parametrize("is_named", [True, False])
def test_an_event_beside_an_output_on_the_host_is_the_peers_fault(
    driver: FakeDriver, server: GpuServer, client: ShmClient, is_named: bool
) -> None:
    with stream_on(driver.runtime()) as stream:
        x = tensor_of(driver, X)
        outputs: Any = {"OUT0": X.nbytes, "OUT1": (X.shape, X.dtype, "cuda:0")}
        server.events = (1,)
        with pytest.raises(PeerError, match="break the protocol: an event, though an output is on the host"):
            client.infer("two", {"IN0": x, "IN1": x}, outputs=outputs, stream=stream if is_named else None)
        server.events = None
        np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU)), 2 * X)


def test_a_kernel_that_fails_is_the_calls_error(driver: FakeDriver, server: GpuServer, cuda: CudaAccess) -> None:
    with gpu_client(server, cuda, lend_bytes=0) as client:
        client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
        server.answers_early = True
        driver.fail_next("cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED", process=0)
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED: a kernel has failed"):
            client.infer("m", {"IN0": tensor_of(driver, X)}, outputs=ON_GPU)


def test_many_calls_over_few_tensors_leave_nothing(driver: FakeDriver, server: GpuServer, client: ShmClient) -> None:
    tensors = [tensor_of(driver, X + number) for number in range(8)]
    for _ in range(3):
        for number, x in enumerate(tensors):
            np.testing.assert_array_equal(on_host(client.infer("m", {"IN0": x}, outputs=ON_GPU)), 2 * (X + number))
    before = driver.live()
    for _ in range(20):
        for x in tensors:
            client.infer("m", {"IN0": x}, outputs=ON_GPU).release()
    assert driver.live() == before


def test_an_error_that_is_kept_keeps_no_slot(client: ShmClient) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE") as caught:
        client.infer("m", {"IN0": X}, outputs={"OUT0": (X.shape, X.dtype, "cuda:7")})
    wait_until(lambda: client.stats().slots_held == 0)
    assert caught.value
