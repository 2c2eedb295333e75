"""Streams, events and captures: the work on a stream is done late, in CUDA's order, and refused as CUDA refuses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of

LATE = 0.05
BLOCKING, NON_BLOCKING = 0, 1
PLAIN, SHARED = 2, 6


def test_what_is_on_a_stream_is_done_late(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAlloc(16))
    words = np.arange(4, dtype=np.int32)
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9  # pageable memory was read already
    assert name_of(cuda.cuStreamQuery(stream)) == "NOT_READY"
    assert driver.memory(int(address), (4,), np.int32).tolist() != [0, 1, 2, 3]
    done(cuda.cuStreamSynchronize(stream))
    assert driver.memory(int(address), (4,), np.int32).tolist() == [0, 1, 2, 3]
    assert name_of(cuda.cuStreamQuery(stream)) == "CUDA_SUCCESS"
    done(cuda.cuMemFree(address))
    done(cuda.cuStreamDestroy(stream))


def test_pinned_memory_is_read_when_the_copy_is_done(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address, words = done(cuda.cuMemAlloc(16)), np.arange(4, dtype=np.int32)
    done(cuda.cuMemHostRegister(words.ctypes.data, 16, 0))
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9
    done(cuda.cuStreamSynchronize(stream))
    assert driver.memory(int(address), (4,), np.int32).tolist() == [9] * 4
    done(cuda.cuMemHostUnregister(words.ctypes.data))
    done(cuda.cuMemFree(address))
    done(cuda.cuStreamDestroy(stream))


@pytest.mark.parametrize("default", [0, 1])
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    cuda: Any, driver: FakeDriver, default: int
) -> None:
    order: list[str] = []
    driver.delay(0.01)
    first, second = (done(cuda.cuStreamCreate(BLOCKING)) for _ in range(2))
    gate = threading.Event()
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    driver.launch(default, lambda: order.append("default"))
    driver.launch(int(second), lambda: order.append("second"))
    time.sleep(0.05)
    assert order == []
    gate.set()
    done(cuda.cuStreamSynchronize(second))
    assert order == ["True", "default", "second"]
    for stream in (first, second):
        done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_stream_does_what_was_on_it(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    driver.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuStreamDestroy(stream))
    done(cuda.cuCtxSynchronize())
    assert order == ["done"]
    assert name_of(cuda.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert driver.violations() == ["a stream was used that is destroyed, or never was"]
    driver.forget()


def test_a_kernel_must_not_call_the_driver(cuda: Any, driver: FakeDriver) -> None:
    found: list[str] = []
    driver.launch(0, lambda: found.append(name_of(cuda.cuMemAlloc(4))))
    done(cuda.cuCtxSynchronize())
    assert found == ["NOT_PERMITTED"]


def test_freeing_waits_for_what_uses_the_memory(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAlloc(16))
    done(cuda.cuMemsetD8Async(address, 1, 16, stream))
    done(cuda.cuMemFree(address))
    assert name_of(cuda.cuStreamQuery(stream)) == "CUDA_SUCCESS"
    done(cuda.cuStreamDestroy(stream))


# Events


def test_a_wait_is_for_the_record_of_its_time(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    gate = threading.Event()
    first, second, waiting = (done(cuda.cuStreamCreate(1)) for _ in range(3))
    event = done(cuda.cuEventCreate(PLAIN))
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    done(cuda.cuEventRecord(event, first))
    done(cuda.cuStreamWaitEvent(waiting, event, 0))
    done(cuda.cuEventRecord(event, second))
    done(cuda.cuEventSynchronize(event))  # of what is recorded now
    driver.launch(int(waiting), lambda: order.append("waited"))
    done(cuda.cuEventDestroy(event))  # at once, though a stream waits
    gate.set()
    done(cuda.cuStreamSynchronize(waiting))
    assert order == ["True", "waited"]
    for stream in (first, second, waiting):
        done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_event_is_not_used(cuda: Any, driver: FakeDriver) -> None:
    event = done(cuda.cuEventCreate(PLAIN))
    done(cuda.cuEventDestroy(event))
    assert name_of(cuda.cuEventRecord(event, 0)) == "INVALID_HANDLE"
    assert name_of(cuda.cuStreamWaitEvent(0, event, 0)) == "INVALID_HANDLE"
    assert driver.violations() == ["an event was used that is destroyed, or never was"] * 2
    driver.forget()


def test_what_the_exporter_has_destroyed_is_not_used(cuda: Any, other: Any, driver: FakeDriver) -> None:
    event = done(cuda.cuEventCreate(SHARED))
    handle = done(cuda.cuIpcGetEventHandle(event))
    opened = done(other.cuIpcOpenEventHandle(handle))
    done(cuda.cuEventDestroy(event))
    assert driver.violations() == []
    assert name_of(other.cuStreamWaitEvent(0, opened, 0)) == "INVALID_HANDLE"
    assert name_of(other.cuEventRecord(opened, 0)) == "INVALID_HANDLE"
    assert driver.violations() == ["an event was used that its exporter has destroyed"] * 2
    driver.forget()
    done(other.cuEventDestroy(opened))
    assert name_of(other.cuIpcOpenEventHandle(handle)) == "INVALID_HANDLE"


# Capture


@pytest.fixture(params=[0, 1])
def stream(cuda: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    stream = done(cuda.cuStreamCreate(request.param))
    yield stream
    cuda.cuStreamEndCapture(stream)
    done(cuda.cuStreamDestroy(stream))


def begin(cuda: Any, stream: Any, mode: str = "GLOBAL") -> None:
    done(cuda.cuStreamBeginCapture(stream, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")))


def test_what_is_captured_is_not_done(cuda: Any, driver: FakeDriver, stream: Any) -> None:
    order: list[str] = []
    begin(cuda, stream)
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 1
    assert int(done(cuda.cuStreamGetCaptureInfo(stream))[0]) == 1
    driver.launch(int(stream), lambda: order.append("done"))
    done(cuda.cuGraphDestroy(done(cuda.cuStreamEndCapture(stream))))
    done(cuda.cuStreamSynchronize(stream))
    assert int(done(cuda.cuStreamIsCapturing(stream))) == 0
    assert order == []


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuMemAlloc"])
def test_what_would_wait_or_allocate_spoils_the_capture(cuda: Any, stream: Any, call: str) -> None:
    begin(cuda, stream)
    arguments = {"cuCtxSynchronize": (), "cuMemAlloc": (4,)}.get(call, (stream,))
    assert name_of(getattr(cuda, call)(*arguments)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert name_of(cuda.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"


def test_events_of_a_capture(cuda: Any, stream: Any) -> None:
    outside, event, second = done(cuda.cuEventCreate(2)), done(cuda.cuEventCreate(2)), done(cuda.cuStreamCreate(1))
    begin(cuda, stream)
    done(cuda.cuEventRecord(event, stream))
    assert name_of(cuda.cuEventQuery(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuEventSynchronize(event)) == "CAPTURED_EVENT"
    assert name_of(cuda.cuStreamWaitEvent(stream, outside, 0)) == "STREAM_CAPTURE_ISOLATION"
    done(cuda.cuStreamWaitEvent(second, event, 0))  # it joins
    assert int(done(cuda.cuStreamIsCapturing(second))) == 1
    done(cuda.cuStreamEndCapture(stream))
    assert int(done(cuda.cuStreamIsCapturing(second))) == 0
    for one in (outside, event):
        done(cuda.cuEventDestroy(one))
    done(cuda.cuStreamDestroy(second))
