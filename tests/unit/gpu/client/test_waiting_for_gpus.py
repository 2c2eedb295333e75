"""Waiting for GPUs blocks no event loop, has the call's deadline, and ends with the model; under stress, too."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shm_backend_utils
from shm_backend_utils.client import DeadlineExceededError, InferenceError, PoolOptions, Result, ShmClient
from shm_backend_utils.errors import PeerError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.fake_wires import async_client_of
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
from tests.unit.gpu.fakes import DRIVER, held_back, stream_on
from tests.unit.side_by_side import side_by_side

LATE_S = 0.3
DIED = "a model's process ended, or its GPU failed, before the work in this call's memory was done"


@pytest.mark.parametrize(
    ("late", "path", "kind", "is_named", "is_old"),
    [
        ("model", "direct", "device", False, False),
        *(("user", "direct", "device", True, False), ("user", "direct", "managed", False, False)),
        *(("user", "direct", "device", False, True), ("user", "inline", "device", True, False)),
        ("user", "inline", "managed", False, True),
    ],
)
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
def test_who_is_late_blocks_no_event_loop(
    server: GpuServer, cuda: CudaAccess, stream: int, late: str, path: Any, kind: str, is_named: bool, is_old: bool
) -> None:
    """Another task of the event loop says that the GPU at work may end."""
    x = tensor_of(X, kind=kind)
    server.answers_early = late == "model"
    if is_old:
        cuda.runtime._version = 12040

    async def run() -> Any:
        async with async_client_of(server, cuda=cuda, pool=PoolOptions(lend_bytes=0)) as client:
            infer = functools.partial(
                client.infer, "m", outputs=ON_GPU, path=path, cuda_stream=stream if is_named else None
            )
            (await infer(inputs={"IN0": X if late == "model" else x})).release()  # makes memory
            with held_back(*((server.own_stream, PROCESS) if late == "model" else (stream, 0))) as finish:
                asyncio.get_running_loop().call_later(0.02, finish.set)
                result = await infer(inputs={"IN0": X if late == "model" else x})
                assert finish.is_set(), "the event loop was blocked"
                np.testing.assert_array_equal(now(address_of(result)), 2 * X)
            result.release()
            return client._memory.bank

    bank = asyncio.run(run())
    server.sweep()
    wait_until(lambda: not bank.collect())


@pytest.mark.parametrize("has_answered", [False, True])
def test_memory_of_a_dead_model_is_not_used_again(server: GpuServer, client: ShmClient, has_answered: bool) -> None:
    client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
    (left,) = server.claims
    server.answers_early, server.dies, server.work_s = has_answered, not has_answered, LATE_S
    server.after = lambda _: server.die()
    with pytest.raises((PeerError, InferenceError), match=DIED if has_answered else "not healthy"):
        client.infer("m", {"IN0": X}, outputs=ON_GPU, timeout_s=20)
    server.answers_early, server.dies, server.work_s, server.after = False, False, 0.0, lambda _: None
    np.testing.assert_array_equal(doubled(client, X), 2 * X)
    assert server.claims[0] != left


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_prepared_call_says_that_its_model_died(server: GpuServer, client: ShmClient, has_answered: bool) -> None:
    with client.prepare("m", {"IN0": PLACE}, outputs=ON_GPU) as call:
        call.infer().release()
        if has_answered:
            server.answers_early = True
            server.after = lambda _: server.die()
            with held_back(server.own_stream, PROCESS), pytest.raises(PeerError, match=DIED):
                call.infer()
            server.runtime.synchronize_device(0)
        else:
            server.dies, server.work_s = True, LATE_S
            with pytest.raises(InferenceError, match="not healthy"):
                call.infer()
        sent = len(server.orders)
        for _ in range(2):
            with pytest.raises(PeerError, match=f"{DIED}.*prepare another"):
                call.infer()
        assert len(server.orders) == sent


def test_a_prepared_call_waits_for_the_models_gpu(server: GpuServer, client: ShmClient) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype)}, outputs=ON_GPU) as call:
        server.answers_early = True
        with held_back(server.own_stream, PROCESS):
            for request in ("the model has answered", "its request was not sent"):
                late = f"a model's GPU was still at work in its memory; {request}"
                with pytest.raises(DeadlineExceededError, match=late):
                    call.infer(timeout_s=0.1)
            assert len(server.orders) == 1
        call.infer().release()


@pytest.mark.parametrize(
    ("events", "outputs", "is_named"),
    [
        *((events, ON_GPU, False) for events in ((1, 2), (0,), (1, 1))),
        *(((1,), {"OUT0": X.nbytes, "OUT1": PLACE}, is_named) for is_named in (True, False)),
    ],
)
def test_events_that_there_are_not_or_cannot_be_are_the_peers_fault(
    server: GpuServer, client: ShmClient, stream: int, events: tuple[int, ...], outputs: Any, is_named: bool
) -> None:
    x = tensor_of(X)
    server.events = events
    with pytest.raises(PeerError, match="the model's results break the protocol: .*event"):
        client.infer(
            "two",
            dict.fromkeys(("IN0", "IN1")[: len(outputs)], x),
            outputs=outputs,
            cuda_stream=stream if is_named else None,
        )
    server.events = None
    np.testing.assert_array_equal(doubled(client, x), 2 * X)


def test_a_kernel_that_fails_is_the_calls_error(server: GpuServer, cuda: CudaAccess) -> None:
    with gpu_client(server, cuda, lend_bytes=0) as client:
        client.infer("m", {"IN0": X}, outputs=ON_GPU).release()
        server.answers_early = True
        DRIVER.fail_next("cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED", process=0)
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED: a kernel has failed"):
            client.infer("m", {"IN0": tensor_of(X)}, outputs=ON_GPU)


def test_an_error_that_is_kept_keeps_no_slot(client: ShmClient) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE") as caught:
        client.infer("m", {"IN0": X}, outputs={"OUT0": (X.shape, X.dtype, "cuda:7")})
    wait_until(lambda: client.stats().slots_held == 0)
    assert caught.value


THREADS = 4
ANSWERS = 40
"""Of each thread."""
WORKS_S = (0, 0, 0.0002, 0.001)


class Stress:
    """Threads with a stream and random calls each, of one client; what came in place of right answers is ``wrong``."""

    def __init__(self, server: GpuServer, client: ShmClient, runtime: CudaRuntime) -> None:
        self.wrong: list[object] = []
        self._server = server
        self._client = client
        self._runtime = runtime

    def ask(self, seed: int) -> None:
        rng, left = random.Random(seed), ANSWERS
        with stream_on(self._runtime) as stream:
            while left > 0:
                DRIVER.delay(rng.choice(WORKS_S))
                self._server.work_s = rng.choice(WORKS_S)
                left -= self._ask_some(rng, stream)

    def _ask_some(self, rng: random.Random, stream: int) -> int:
        values = X + np.float32(rng.randrange(1, 1000))
        kind = rng.choice(("host", "device", "device", "pool"))
        outputs = rng.choice((ON_GPU, ON_GPU, ON_HOST))
        way = rng.choice(("infer", "submit", "prepare") if kind == "device" else ("infer", "submit"))
        x: Any = values
        if kind != "host":
            x = tensor_of(np.zeros_like(X), rng.choice((0, 64)), kind=kind)
            x.write(values, stream)
            x.stream = None  # no library knows: that is what is named
        named = rng.choice((stream, stream, None))
        case = (way, kind, outputs is ON_GPU, named is None)
        if way == "prepare":
            with self._client.prepare("m", {"IN0": x}, outputs=outputs) as call:
                for number in range(2):
                    if number:
                        values = values + 1
                        x.write(values, stream)
                        x.stream = None
                    self._check(case, call.infer(cuda_stream=named), values, stream)
            return 2
        ask = getattr(self._client, way)("m", {"IN0": x}, outputs=outputs, cuda_stream=named)
        self._check(case, ask if way == "infer" else ask.result(), values, stream)
        return 1

    def _check(self, case: object, result: Result, values: npt.NDArray[np.float32], stream: int) -> None:
        found: Any = result["OUT0"]
        if not isinstance(found, np.ndarray):
            read: list[npt.NDArray[np.float32]] = []
            address = address_of(result)
            del found
            DRIVER.launch(stream, lambda: read.append(now(address).copy()))
            result.release()  # it may be used again at once, behind what reads it on the stream
            self._runtime.synchronize_stream(stream, 0)
            (found,) = read
        if not np.array_equal(found, 2 * values):
            self.wrong.append((case, found[found != 2 * values][:3], 2 * values[found != 2 * values][:3]))


@pytest.mark.parametrize(
    ("pool_region", "answers_early"), [("sealed", True), ("system", False)], ids=["early", "when it is done"]
)
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@pytest.mark.usefixtures("switching_often")
def test_no_answer_is_wrong(server: GpuServer, client: ShmClient, runtime: CudaRuntime, answers_early: bool) -> None:
    server.answers_early = answers_early
    stress = Stress(server, client, runtime)
    side_by_side(*[functools.partial(stress.ask, seed) for seed in range(THREADS)])
    assert stress.wrong == []


PACKAGE = Path(shm_backend_utils.__file__).parent
INTERRUPTED = (
    *("client/paths/on_gpus.py", "client/paths/taking.py", "client/inputs/devices.py"),
    *("gpu/memory/allocations.py", "gpu/memory/by_descriptor.py", "gpu/memory/bank.py", "gpu/ordering.py"),
)
TAKEN_OVER = {"_give_up", "keep_while", "<lambda>"}
"""Where banks take memory over: an interrupt there may lose it; what it must not do is test_device_bank's."""


class InterruptsBefore(Interrupts):
    """Interrupts everywhere but where memory is taken over."""

    def _uninterrupted(self, code: CodeType) -> set[int]:
        return set(range(len(code.co_code))) if code.co_name in TAKEN_OVER else super()._uninterrupted(code)


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in a finalizer is swallowed by Python, and must not be kept, with all its frames, by others."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@pytest.mark.parametrize("way", ["lent", "copied", "prepared"])
def test_after_an_interrupt_the_next_call_is_right(server: GpuServer, cuda: CudaAccess, way: str) -> None:
    DRIVER.delay(0)
    x = tensor_of(X, kind="pool" if way == "copied" else "device")

    with gpu_client(server, cuda, lend_bytes=0) as client:

        def work() -> None:
            if way == "prepared":
                with client.prepare("m", {"IN0": x}, outputs=ON_GPU) as call:
                    on_host(call.infer())
            else:
                doubled(client, x)

        interrupts, number, is_interrupted = InterruptsBefore(*(PACKAGE / each for each in INTERRUPTED)), 1, True
        while is_interrupted:
            is_interrupted = interrupts.at(number, work)
            np.testing.assert_array_equal(doubled(client, x), 2 * X, err_msg=interrupts.where)
            number += 11  # of as many places to be interrupted at
