"""Streams and events, of several devices and of other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import PATIENCE_S, fails_by


@pytest.fixture
def stream(gpu: CudaRuntime) -> Iterator[int]:
    stream = gpu.create_stream(1)
    yield stream
    gpu.destroy_stream(stream, 1)


@pytest.fixture
def event(gpu: CudaRuntime) -> Iterator[int]:
    event = gpu.create_event(1)
    yield event
    gpu.destroy_event(event, 1)


@pytest.fixture
def busy(driver: FakeDriver, stream: int) -> Iterator[threading.Event]:
    """Something on the stream, until this is set."""
    finish = threading.Event()
    driver.launch(stream, lambda: finish.wait(PATIENCE_S))
    yield finish
    finish.set()


def waits_for(wait: Callable[[], Any], finish: threading.Event) -> bool:
    """Return whether a call returns when the work is done, and not before."""
    done = threading.Event()

    def wait_for_it() -> None:
        wait()
        done.set()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    has_waited = not done.wait(0.02)
    finish.set()
    thread.join(PATIENCE_S)
    return has_waited and done.is_set()


def test_a_device_is_waited_for_with_all_its_streams(gpu: CudaRuntime, busy: threading.Event) -> None:
    gpu.synchronize_device(0)
    assert waits_for(lambda: gpu.synchronize_device(1), busy)


@pytest.mark.parametrize("default", [0, 1, 2])
def test_our_streams_do_not_wait_for_the_default_ones(
    driver: FakeDriver, gpu: CudaRuntime, stream: int, default: int
) -> None:
    finish = threading.Event()
    with gpu.on(1):
        driver.launch(default, lambda: finish.wait(PATIENCE_S))
    gpu.synchronize_stream(stream, 1)
    finish.set()
    gpu.synchronize_device(1)


def test_an_event_stands_for_what_is_on_the_stream(
    gpu: CudaRuntime, stream: int, event: int, busy: threading.Event
) -> None:
    with gpu.on(1):
        gpu.record(event, stream)
    assert not gpu.is_event_done(event)
    assert waits_for(lambda: gpu.synchronize_event(event), busy)
    assert gpu.is_event_done(event)


def test_an_event_stands_for_all_that_a_device_does(gpu: CudaRuntime, event: int, busy: threading.Event) -> None:
    gpu.record_device(event, 1)
    assert not gpu.is_event_done(event)
    assert waits_for(lambda: gpu.synchronize_event(event), busy)


def test_a_driver_before_12_5_waits_for_the_device(
    driver: FakeDriver, gpu: CudaRuntime, event: int, busy: threading.Event
) -> None:
    gpu._version = 12040
    asked = driver.count("cuCtxRecordEvent")
    assert waits_for(lambda: gpu.record_device(event, 1), busy)
    gpu.synchronize_event(event)
    assert driver.count("cuCtxRecordEvent") == asked


def test_an_event_is_recorded_on_no_stream_of_another_device(gpu: CudaRuntime, event: int) -> None:
    other = gpu.create_stream(0)
    with gpu.on(0), fails_by("CUDA_ERROR_INVALID_HANDLE"):
        gpu.record(event, other)
    gpu.destroy_stream(other, 0)


def test_an_event_that_is_not_shared_is_not_exported(gpu: CudaRuntime, event: int) -> None:
    with fails_by("CUDA_ERROR_INVALID_HANDLE"):
        gpu.export_event(event)


# Streams that are captured into graphs


@pytest.fixture
def captured(driver: FakeDriver, gpu: CudaRuntime, stream: int) -> Iterator[list[str]]:
    """Our stream is being captured by another thread, until the end; then this has how that went."""
    bindings, ended, began, how = driver.bindings(), threading.Event(), threading.Event(), []

    def capture() -> None:
        with gpu.on(1):
            mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            assert not bindings.cuStreamBeginCapture(stream, mode)[0]
            began.set()
            ended.wait(PATIENCE_S)
            how.append(bindings.cuStreamEndCapture(stream)[0].name)

    thread = threading.Thread(target=capture)
    thread.start()
    assert began.wait(PATIENCE_S)
    yield how
    ended.set()
    thread.join(PATIENCE_S)
    assert how == ["CUDA_SUCCESS"], "it was spoiled"


def test_a_stream_that_is_captured_is_known(gpu: CudaRuntime, stream: int, captured: list[str]) -> None:
    with gpu.on(1):
        assert gpu.is_capturing(stream)
        assert [gpu.is_capturing(default) for default in (0, 1, 2)] == [False, False, False]
    assert not captured


def test_what_we_do_meanwhile_neither_fails_nor_spoils_the_graph(gpu: CudaRuntime, captured: list[str]) -> None:
    """By default, no thread may allocate while one captures."""
    address = gpu.allocate(1, 1)
    gpu.free(address, 1)
    event = gpu.create_event(1)
    with gpu.on(1):
        assert gpu.is_event_done(event)
    gpu.destroy_event(event, 1)
    assert not captured


def test_a_threads_mode_of_capturing_is_its_own_again(driver: FakeDriver, gpu: CudaRuntime) -> None:
    bindings = driver.bindings()
    modes = bindings.CUstreamCaptureMode

    def exchange(mode: Any) -> Any:
        return bindings.cuThreadExchangeStreamCaptureMode(mode)[1]

    for mode in (modes.CU_STREAM_CAPTURE_MODE_GLOBAL, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL):
        former = exchange(mode)
        with gpu.on(0), gpu.on(1):
            pass
        assert exchange(former) == mode
