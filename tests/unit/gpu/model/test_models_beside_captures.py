"""A model beside graph captures of its process, which it ends only if it names no stream; the calls that it makes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call
from tests.unit.gpu.fakes import (
    DRIVER,
    MODEL,
    MODES,
    PATIENCE_S,
    array_on,
    captured,
    captured_elsewhere,
    held_back,
    kernel,
    left_of,
    recorded_calls,
)
from tests.unit.gpu.model.conftest import DEVICE, HOST, Calls, Client, calls_of

REFUSED = "shm:model: this call names no stream on a GPU"


def double(stream: int, call: Call) -> None:
    call.ready_on(stream)
    x = call.to_host(call.input("X"))
    y, z = call.device_output("Y", (4,), np.float32), array_on(call._context.arrays.runtime, np.zeros(4))
    kernel(stream, lambda memory: np.copyto(memory, 2 * x), y.array, late_s=0.001)
    call.put("Z", z)
    call.to_device(call.output("Z", (4,), np.float32))


def fail_unnamed(call: Call) -> None:
    call.input("X")
    print(1 / 0)


def fail_named(stream: int, call: Call) -> None:
    double(stream, call)
    print(1 / 0)


@pytest.mark.parametrize("is_by_event", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_names_its_streams_ends_no_capture(
    cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch, mode: str, is_by_event: bool
) -> None:
    with calls_of(cuda, client, monkeypatch, gpu_events=is_by_event) as calls, captured_elsewhere(mode):
        for where in (DEVICE, HOST):
            for slot in range(2):
                client.write(slot, slot + 1)
                is_lent = bool(slot)
                calls.serve(
                    functools.partial(double, calls.stream),
                    {"Y": where, "Z": where},
                    slot=slot,
                    is_for_one_request=is_lent,
                )
                client.wait_for_gpus(slot)
                assert client.output(slot) == [2 * slot + 2] * 4
        for fail in (fail_unnamed, functools.partial(fail_named, calls.stream)):
            assert "division by zero" in calls.refusal(fail, {"Y": HOST, "Z": HOST}, slot=2)
        calls.session._open_context().resolver.sweep()
        calls.session.close()
        assert left_of(MODEL).opened == 0


@pytest.mark.parametrize("way", ["copy", "end"])
def test_a_call_without_streams_is_refused_and_the_capture_goes_on(calls: Calls, way: str) -> None:
    bindings = DRIVER.bindings(MODEL)
    with bindings.context(0):
        blocking = int(bindings.cuStreamCreate(0)[1])

    def infer(call: Call) -> None:
        if way == "copy":
            call.to_host(call.input("X"))

    with captured(blocking):
        said = calls.refusal(infer)
    assert said.startswith(REFUSED)
    assert said.endswith("name the call's streams by call.ready_on, or capture no graph meanwhile")
    calls.serve(infer, slot=1)
    calls.cuda.destroy_stream(blocking, 0)


def test_if_the_driver_refuses_the_call_the_reason_is_the_same(calls: Calls) -> None:
    def infer(_: Call) -> None:
        DRIVER.fail_next("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", process=MODEL)

    assert calls.refusal(infer).startswith(REFUSED)


def test_a_request_does_not_wait_while_a_thread_frees_memory(calls: Calls) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(PATIENCE_S)

    calls.cuda.retired.add(work)
    calls.cuda.retired.collect_soon()
    assert inside.wait(PATIENCE_S)
    calls.serve(functools.partial(double, calls.stream), {"Y": DEVICE, "Z": DEVICE})
    assert not go_on.is_set()
    go_on.set()


def test_a_sweep_waits_for_no_gpu(calls: Calls) -> None:
    resolver = calls.session._open_context().resolver
    assert resolver._cuda.runtime is calls.cuda
    calls.cuda.retired.add(functools.partial(calls.cuda.free, calls.cuda.allocate(1, 0), 0))
    with held_back(calls.stream):
        resolver.sweep()
        resolver._sweep_quietly()
        assert calls.cuda.retired.is_waiting, "the sweep has waited until the stream was done"


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
def warm_calls(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch, is_early: bool) -> Iterator[Calls]:
    with calls_of(cuda, client, monkeypatch, gpu_events=is_early) as calls:
        yield calls


def test_a_call_that_names_its_stream(warm_calls: Calls, is_early: bool) -> None:
    def infer(call: Call) -> None:
        call.ready_on(warm_calls.stream)
        call.input("X")
        call.output("Y", (4,), np.float32)

    for _ in range(3):
        with recorded_calls(warm_calls.cuda) as found:
            warm_calls.serve(infer, {"Y": DEVICE})
        assert bool(warm_calls.client.events()) == is_early
        warm_calls.client.wait_for_gpus()
        warm_calls.collect()
    assert found == [*READY_ON, *ENDS[is_early]]


def test_a_copy_to_the_gpu(warm_calls: Calls) -> None:
    def infer(call: Call) -> None:
        call.ready_on(warm_calls.stream)
        call.to_device(call.input("X")).let_wait(warm_calls.stream, DEVICE)

    for _ in range(3):
        request = warm_calls.client.host.request({"X": np.ones(4, np.float32)}, {})
        with recorded_calls(warm_calls.cuda) as found:
            (response,) = warm_calls.session.serve([request], infer)
        assert response.error() is None
    assert len(found) <= 39, " ".join(found)
