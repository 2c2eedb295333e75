"""Work that is put in order: what is named comes first, or all that a device does; and no host waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.ordering import Mark, order_after
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.cuda.streams import NamedEvent, NamedStream
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.gpus import PATIENCE_S, fails_by


class Work:
    """What is to be done on a stream, until it is let go on."""

    def __init__(self, driver: FakeDriver, gpu: CudaRuntime, stream: int, device: int, done: list[str]) -> None:
        self._finish, self._is_over = threading.Event(), threading.Event()

        def work() -> None:
            self._finish.wait(PATIENCE_S)
            done.append("work")
            self._is_over.set()

        with gpu.on(device):
            driver.launch(stream, work)

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def finish(self) -> None:
        self._finish.set()


@pytest.fixture
def streams(gpu: CudaRuntime) -> Iterator[list[int]]:
    """Two streams of each device: 0 and 1 are of device 0, 2 and 3 of device 1."""
    streams = [gpu.create_stream(device) for device in (0, 0, 1, 1)]
    yield streams
    for device, stream in zip((0, 0, 1, 1), streams, strict=True):
        gpu.destroy_stream(stream, device)


def put_behind(
    driver: FakeDriver,
    gpu: CudaRuntime,
    named: Sequence[NamedStream | NamedEvent],
    device: int,
    then: int,
    work: Work,
    done: list[str],
) -> None:
    """Put something on a stream behind what is named, while the work is still to be let go on."""
    order_after(gpu, named, device, then)
    assert not work.is_over, "the host has waited for it"
    with gpu.on(device):
        driver.launch(then, lambda: done.append("then"))


def comes_after(
    driver: FakeDriver, gpu: CudaRuntime, named: Any, device: int, then: int, work: Work, done: list[str]
) -> None:
    """See that what comes on a stream then is done after the work."""
    put_behind(driver, gpu, named, device, then, work, done)
    time.sleep(0.02)
    assert "then" not in done
    work.finish()
    gpu.synchronize_stream(then, device)


def does_not_wait(
    driver: FakeDriver, gpu: CudaRuntime, named: Any, device: int, then: int, work: Work, done: list[str]
) -> None:
    """See that what comes on a stream then is done without the work."""
    put_behind(driver, gpu, named, device, then, work, done)
    gpu.synchronize_stream(then, device)
    assert not work.is_over
    work.finish()


@pytest.mark.parametrize("delay", [0, 0.005])
@pytest.mark.parametrize("device", [0, 1])
def test_a_stream_that_is_named_comes_first(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int], device: int, delay: float
) -> None:
    driver.delay(delay)
    done: list[str] = []
    work = Work(driver, gpu, streams[0], 0, done)
    comes_after(driver, gpu, [NamedStream(streams[0])], device, streams[2 * device + 1], work, done)
    assert done == ["work", "then"]


def test_streams_that_are_not_named_do_not(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> None:
    done: list[str] = []
    work = Work(driver, gpu, streams[0], 0, done)
    does_not_wait(driver, gpu, [NamedStream(streams[2])], 0, streams[1], work, done)


def test_all_that_are_named_come_first(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> None:
    for order in (1, -1):
        done: list[str] = []
        works = [Work(driver, gpu, streams[0], 0, done), Work(driver, gpu, streams[2], 1, done)][::order]
        works[0].finish()
        named = [NamedStream(streams[0]), NamedStream(streams[2])]
        comes_after(driver, gpu, named, 1, streams[3], works[1], done)
        assert sorted(done) == ["then", "work", "work"]
        assert done[-1] == "then"


@pytest.mark.parametrize("of_stream", [0, 1])
def test_where_none_is_named_all_of_the_device_comes_first(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int], of_stream: int
) -> None:
    done: list[str] = []
    work = Work(driver, gpu, streams[2 + of_stream], 1, done)
    then = gpu.create_stream(1)
    comes_after(driver, gpu, [], 1, then, work, done)
    assert done == ["work", "then"]
    gpu.destroy_stream(then, 1)


def test_where_none_is_named_other_devices_do_not(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> None:
    done: list[str] = []
    work = Work(driver, gpu, streams[0], 0, done)
    does_not_wait(driver, gpu, [], 1, streams[2], work, done)


def test_what_comes_later_on_the_named_stream_is_not_waited_for(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int]
) -> None:
    done: list[str] = []
    order_after(gpu, [NamedStream(streams[0])], 0, streams[1])
    work = Work(driver, gpu, streams[0], 0, done)
    driver.launch(streams[1], lambda: done.append("then"))
    gpu.synchronize_stream(streams[1], 0)
    assert done == ["then"]
    work.finish()


@pytest.mark.parametrize("handle", [0, 1])
@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("device", [0, 1])
def test_a_default_stream_is_the_devices_that_is_meant_or_said(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int], handle: int, device: int, says_so: bool
) -> None:
    """Two GPUs have default streams of the same number."""
    done: list[str] = []
    work = Work(driver, gpu, handle, device, done)
    named = NamedStream(handle, device if says_so else None)
    then_on = 1 - device if says_so else device
    comes_after(driver, gpu, [named], then_on, streams[2 * then_on], work, done)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_is_not_that_of_the_other_gpu(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int], handle: int
) -> None:
    done: list[str] = []
    work = Work(driver, gpu, handle, 1, done)
    does_not_wait(driver, gpu, [NamedStream(handle)], 0, streams[0], work, done)


def test_a_threads_own_default_stream_is_the_calling_threads(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int]
) -> None:
    done: list[str] = []
    work = Work(driver, gpu, 2, 0, done)
    elsewhere = threading.Thread(target=order_after, args=(gpu, [NamedStream(2)], 0, streams[1]))
    elsewhere.start()
    elsewhere.join(PATIENCE_S)
    gpu.synchronize_stream(streams[1], 0)
    assert done == []
    comes_after(driver, gpu, [NamedStream(2)], 0, streams[0], work, done)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("device", [0, 1])
def test_an_event_that_is_named_comes_first_and_not_the_device(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int], device: int, is_recorded: bool
) -> None:
    done: list[str] = []
    work = Work(driver, gpu, streams[0], 0, done)
    event = gpu.create_event(0)
    with gpu.on(0):
        gpu.record(event, streams[0 if is_recorded else 1])
    then = streams[2 * device + 1]
    check = comes_after if is_recorded else does_not_wait
    check(driver, gpu, [NamedEvent(event)], device, then, work, done)
    gpu.destroy_event(event, 0)


def test_a_driver_before_12_5_waits_for_a_device_but_not_for_streams(
    driver: FakeDriver, gpu: CudaRuntime, streams: list[int]
) -> None:
    gpu._version = 12040
    done: list[str] = []
    work = Work(driver, gpu, streams[0], 0, done)
    comes_after(driver, gpu, [NamedStream(streams[0])], 0, streams[1], work, done)
    work = Work(driver, gpu, streams[0], 0, done)
    threading.Timer(0.02, work.finish).start()
    order_after(gpu, [], 0, streams[1])
    assert done == ["work", "then", "work"]


def test_events_of_ours_are_gone_then(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> None:
    for named in ([], [NamedStream(0)], [NamedStream(each) for each in streams]):
        order_after(gpu, named, 1, streams[3])
        assert driver.live(0) == LiveCounts(streams=4)


# Captured streams: what waits for one is captured, too, and not done.


@pytest.fixture
def capture(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> Iterator[int]:
    """The first stream is being captured."""
    bindings = driver.bindings()
    with gpu.on(0):
        assert not bindings.cuStreamBeginCapture(
            streams[0], bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )[0]
        yield streams[0]
        error, _ = bindings.cuStreamEndCapture(streams[0])
        assert error.name == "CUDA_SUCCESS"


def test_a_stream_that_is_captured_is_an_error_and_not_joined(
    gpu: CudaRuntime, streams: list[int], capture: int
) -> None:
    with pytest.raises(CudaError, match="end the capture first, or name a stream that is not part of it"):
        order_after(gpu, [NamedStream(capture)], 0, streams[1])
    assert not gpu.is_capturing(streams[1])


def test_an_event_of_a_capture_is_an_error_and_not_joined(gpu: CudaRuntime, streams: list[int], capture: int) -> None:
    event = gpu.create_event(0)
    gpu.record(event, capture)
    with fails_by("CUDA_ERROR_CAPTURED_EVENT"):
        order_after(gpu, [NamedEvent(event)], 0, streams[1])
    assert not gpu.is_capturing(streams[1])
    gpu.destroy_event(event, 0)


# Marks


def test_a_mark_stands_for_what_is_on_a_stream(driver: FakeDriver, gpu: CudaRuntime, streams: list[int]) -> None:
    done: list[str] = []
    work = Work(driver, gpu, streams[2], 1, done)
    with Mark(gpu, streams[2], 1) as mark, Mark(gpu, streams[3], 1) as other:
        other.wait()
        assert (mark.is_done(), other.is_done()) == (False, True)
        driver.launch(streams[2], lambda: done.append("later"))
        work.finish()
        mark.wait()
        assert mark.is_done()
        assert done[0] == "work"
