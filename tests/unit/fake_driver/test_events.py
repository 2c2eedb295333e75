"""Events, plain ones and those between processes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import bytes_of, done, filled, in_a_process, name_of

PLAIN, SHARED = 2, 6


def test_an_event_stands_for_what_was_on_the_stream(cuda: Any, driver: FakeDriver) -> None:
    gate = threading.Event()
    stream, event = done(cuda.cuStreamCreate(1)), done(cuda.cuEventCreate(PLAIN))
    assert name_of(cuda.cuEventQuery(event)) == "CUDA_SUCCESS"  # it was never recorded
    driver.launch(int(stream), lambda: gate.wait(10))
    done(cuda.cuEventRecord(event, stream))
    assert name_of(cuda.cuEventQuery(event)) == "NOT_READY"
    gate.set()
    done(cuda.cuEventSynchronize(event))
    assert name_of(cuda.cuEventQuery(event)) == "CUDA_SUCCESS"
    done(cuda.cuEventDestroy(event))
    done(cuda.cuStreamDestroy(stream))


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


def test_an_event_of_the_whole_device(cuda: Any, driver: FakeDriver) -> None:
    gate = threading.Event()
    stream, event = done(cuda.cuStreamCreate(1)), done(cuda.cuEventCreate(PLAIN))
    driver.launch(int(stream), lambda: gate.wait(10))
    done(cuda.cuCtxRecordEvent(done(cuda.cuCtxGetCurrent()), event))
    assert name_of(cuda.cuEventQuery(event)) == "NOT_READY"
    gate.set()
    done(cuda.cuEventSynchronize(event))
    done(cuda.cuEventDestroy(event))
    done(cuda.cuStreamDestroy(stream))


def test_event_and_stream_are_of_one_device(cuda: Any) -> None:
    event = done(cuda.cuEventCreate(PLAIN))
    with cuda.context(1):
        stream = done(cuda.cuStreamCreate(1))
        assert name_of(cuda.cuEventRecord(event, stream)) == "INVALID_HANDLE"
        assert name_of(cuda.cuEventRecord(event, 0)) == "INVALID_HANDLE"
    done(cuda.cuStreamWaitEvent(stream, event, 0))
    done(cuda.cuEventDestroy(event))
    done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_event_is_not_used(cuda: Any, driver: FakeDriver) -> None:
    event = done(cuda.cuEventCreate(PLAIN))
    done(cuda.cuEventDestroy(event))
    assert name_of(cuda.cuEventRecord(event, 0)) == "INVALID_HANDLE"
    assert name_of(cuda.cuStreamWaitEvent(0, event, 0)) == "INVALID_HANDLE"
    assert driver.violations() == ["an event was used that is destroyed, or never was"] * 2
    driver.forget()


def test_events_between_processes_have_no_timing(cuda: Any) -> None:
    assert name_of(cuda.cuEventCreate(4)) == "INVALID_VALUE"
    event = done(cuda.cuEventCreate(PLAIN))
    assert name_of(cuda.cuIpcGetEventHandle(event)) == "INVALID_HANDLE"
    done(cuda.cuEventDestroy(event))


def test_the_opener_records_and_the_owner_waits(cuda: Any, other: Any, driver: FakeDriver) -> None:
    gate = threading.Event()
    event = done(cuda.cuEventCreate(SHARED))
    handle = done(cuda.cuIpcGetEventHandle(event))
    assert name_of(cuda.cuIpcOpenEventHandle(handle)) == "INVALID_CONTEXT"
    opened = done(other.cuIpcOpenEventHandle(handle))
    stream = done(other.cuStreamCreate(1))
    driver.launch(int(stream), lambda: gate.wait(10), 1)
    done(other.cuEventRecord(opened, stream))
    assert name_of(cuda.cuEventQuery(event)) == "NOT_READY"
    done(cuda.cuStreamWaitEvent(0, event, 0))
    assert name_of(cuda.cuStreamQuery(0)) == "NOT_READY"
    gate.set()
    done(cuda.cuStreamSynchronize(0))
    assert name_of(cuda.cuEventQuery(event)) == "CUDA_SUCCESS"
    done(other.cuStreamDestroy(stream))
    done(other.cuEventDestroy(opened))
    done(cuda.cuEventDestroy(event))


def test_another_operating_system_process_records(cuda: Any) -> None:
    event = done(cuda.cuEventCreate(SHARED))
    program = """
    driver.delay(0.3)
    event = done(cuda.cuIpcOpenEventHandle(filled(cuda, "CUipcEventHandle", bytes.fromhex(sys.argv[1]))))
    address = done(cuda.cuMemAlloc(16))
    done(cuda.cuMemsetD8Async(address, 1, 16, 0))
    done(cuda.cuEventRecord(event, 0))
    print("recorded", flush=True)
    done(cuda.cuCtxSynchronize())
    """
    with in_a_process(program, bytes_of(done(cuda.cuIpcGetEventHandle(event))).hex()) as process:
        assert process.stdout
        assert process.stdout.readline() == "recorded\n"
        assert name_of(cuda.cuEventQuery(event)) == "NOT_READY"
        done(cuda.cuEventSynchronize(event))
    assert process.returncode == 0
    done(cuda.cuEventDestroy(event))


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


def test_garbage_is_no_event(other: Any) -> None:
    handle = filled(other, "CUipcEventHandle", np.random.default_rng(1).bytes(64))
    assert name_of(other.cuIpcOpenEventHandle(handle)) == "INVALID_VALUE"


def test_the_time_between_two_events(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(0.02)
    before, after = (done(cuda.cuEventCreate(0)) for _ in range(2))
    done(cuda.cuEventRecord(before, 0))
    driver.launch(0, lambda: None)
    done(cuda.cuEventRecord(after, 0))
    done(cuda.cuEventSynchronize(after))
    assert 19 < done(cuda.cuEventElapsedTime(before, after)) < 2000
    for event in (before, after):
        done(cuda.cuEventDestroy(event))
