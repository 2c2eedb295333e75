"""A model beside graph captures of its process: what names its streams ends none, and the rest is refused."""

from __future__ import annotations

import functools
import threading

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
    content,
    held_back,
    kernel,
    left_of,
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


def test_memory_of_calls_is_used_again_and_waits_for_no_stranger(calls: Calls) -> None:
    addresses = set()

    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        y = call.device_output("Y", (4,), np.float32)
        addresses.add(y.array.address)
        kernel(calls.stream, lambda memory: memory.fill(7), y.array)

    DRIVER.forget()
    for slot in range(3):
        calls.serve(infer, {"Y": HOST}, slot=slot)
        assert calls.client.output(slot) == [7] * 4
    assert (len(addresses), DRIVER.count("cuMemFree", MODEL), DRIVER.count("cuMemAlloc", MODEL)) == (1, 0, 1)


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


def test_an_array_that_model_py_keeps_is_its_own(calls: Calls) -> None:
    kept = []

    def infer(call: Call) -> None:
        call.ready_on(calls.stream)
        kept.append(call.device_output("Y", (4,), np.float32).array)

    calls.serve(infer, {"Y": HOST})
    content(kept[0])[:] = 3
    calls.serve(infer, {"Y": HOST}, slot=1)
    assert len({each.address for each in kept}) == 2
    assert content(kept[0]).tolist() == [3] * 4
    kept.clear()
