"""Work in order: after what is named, or after all that a device does; no host waits. And streams of our own."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.ordering import Mark, OwnStreams, order_after
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import NamedEvent, NamedStream
from tests.unit.gpu.fakes import (
    DRIVER,
    NOTHING,
    PATIENCE_S,
    captured,
    collect_all,
    fails_by,
    in_another_thread,
    stream_on,
    wait_until,
)
from tests.unit.side_by_side import side_by_side


class Work:
    """What is to be done on a stream, until it is let go on; ``done`` has what was done, in its order."""

    def __init__(self, gpu: CudaRuntime, stream: int, device: int) -> None:
        self.done: list[str] = []
        self._gpu = gpu
        self._finish = threading.Event()

        def work() -> None:
            self._finish.wait(PATIENCE_S)
            self.done.append("work")

        with gpu.on(device):
            DRIVER.launch(stream, work)

    def finish(self) -> None:
        self._finish.set()

    def comes_before(self, named: Sequence[NamedStream | NamedEvent], device: int, then: int) -> None:
        self._put_behind(named, device, then)
        time.sleep(0.02)
        assert self.done == []
        self.finish()
        self._gpu.synchronize_stream(then, device)
        assert self.done == ["work", "then"]

    def is_not_waited_for(self, named: Sequence[NamedStream | NamedEvent], device: int, then: int) -> None:
        self._put_behind(named, device, then)
        self._gpu.synchronize_stream(then, device)
        assert self.done == ["then"]
        self.finish()

    def _put_behind(self, named: Sequence[NamedStream | NamedEvent], device: int, then: int) -> None:
        order_after(OwnStreams(self._gpu), named, device, then)
        assert self.done == [], "the host has waited for it"
        with self._gpu.on(device):
            DRIVER.launch(then, lambda: self.done.append("then"))


Begin = Callable[[int, int], Work]


@pytest.fixture
def begin(gpu: CudaRuntime) -> Begin:
    return functools.partial(Work, gpu)


@pytest.fixture
def streams(gpu: CudaRuntime) -> Iterator[list[int]]:
    """Two streams of each device: 0 and 1 are of device 0, 2 and 3 of device 1."""
    with stream_on(gpu) as a, stream_on(gpu) as b, stream_on(gpu, 1) as c, stream_on(gpu, 1) as d:
        yield [a, b, c, d]


@pytest.mark.parametrize("delay", [0, 0.005])
@pytest.mark.parametrize("device", [0, 1])
def test_a_stream_that_is_named_comes_first_alone(begin: Begin, streams: list[int], device: int, delay: float) -> None:
    DRIVER.delay(delay)
    begin(streams[0], 0).comes_before([NamedStream(streams[0])], device, streams[2 * device + 1])
    begin(streams[0], 0).is_not_waited_for([NamedStream(streams[2])], 0, streams[1])


@pytest.mark.parametrize("last", [0, 1])
def test_all_that_are_named_come_first(begin: Begin, streams: list[int], last: int) -> None:
    works = [begin(streams[0], 0), begin(streams[2], 1)]
    works[1 - last].finish()
    works[last].comes_before([NamedStream(streams[0]), NamedStream(streams[2])], 1, streams[3])


def test_where_none_is_named_all_of_the_device_comes_first(begin: Begin, streams: list[int]) -> None:
    begin(streams[2], 1).comes_before([], 1, streams[3])
    begin(streams[0], 0).is_not_waited_for([], 1, streams[2])


def test_what_comes_later_there_is_not_waited_for(gpu: CudaRuntime, begin: Begin, streams: list[int]) -> None:
    order_after(OwnStreams(gpu), [NamedStream(streams[0])], 0, streams[1])
    work = begin(streams[0], 0)
    DRIVER.launch(streams[1], lambda: work.done.append("then"))
    gpu.synchronize_stream(streams[1], 0)
    assert work.done == ["then"]
    work.finish()


@pytest.mark.parametrize("handle", [0, 1])
@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("device", [0, 1])
def test_default_streams_of_devices(begin: Begin, streams: list[int], handle: int, device: int, says_so: bool) -> None:
    named = NamedStream(handle, device if says_so else None)
    then_on = 1 - device if says_so else device
    begin(handle, device).comes_before([named], then_on, streams[2 * then_on])


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_is_not_that_of_the_other_gpu(begin: Begin, streams: list[int], handle: int) -> None:
    begin(handle, 1).is_not_waited_for([NamedStream(handle)], 0, streams[0])


def test_a_threads_own_stream_is_the_calling_threads(gpu: CudaRuntime, begin: Begin, streams: list[int]) -> None:
    work = begin(2, 0)
    in_another_thread(lambda: order_after(OwnStreams(gpu), [NamedStream(2)], 0, streams[1]))
    gpu.synchronize_stream(streams[1], 0)
    work.comes_before([NamedStream(2)], 0, streams[0])


@pytest.mark.parametrize("device", [0, 1])
def test_a_named_event_comes_first_alone(gpu: CudaRuntime, begin: Begin, streams: list[int], device: int) -> None:
    then, event = streams[2 * device + 1], gpu.create_event(0)
    begin(streams[0], 0).is_not_waited_for([NamedEvent(event)], device, then)
    work = begin(streams[0], 0)
    with gpu.on(0):
        gpu.record(event, streams[0])
    work.comes_before([NamedEvent(event)], device, then)
    gpu.destroy_event(event, 0)


def test_a_driver_before_12_5_waits_for_devices_alone(gpu: CudaRuntime, begin: Begin, streams: list[int]) -> None:
    gpu._version = 12040
    begin(streams[0], 0).comes_before([NamedStream(streams[0])], 0, streams[1])
    work, asked = begin(streams[0], 0), DRIVER.count("cuCtxRecordEvent")
    threading.Timer(0.02, work.finish).start()
    order_after(OwnStreams(gpu), [], 0, streams[1])
    assert (work.done, DRIVER.count("cuCtxRecordEvent")) == (["work"], asked)


def test_what_is_captured_is_an_error_and_not_joined(gpu: CudaRuntime, streams: list[int]) -> None:
    """What waits for it would be captured, too, and not be done."""
    event = gpu.create_event(0)
    with captured(streams[0]), gpu.on(0):
        gpu.record(event, streams[0])
        with pytest.raises(CudaError, match="end the capture first, or name a stream that is not part of it"):
            order_after(OwnStreams(gpu), [NamedStream(streams[0])], 0, streams[1])
        with fails_by("CUDA_ERROR_CAPTURED_EVENT"):
            order_after(OwnStreams(gpu), [NamedEvent(event)], 0, streams[1])
        assert not gpu.is_capturing(streams[1])
    gpu.destroy_event(event, 0)


def test_a_mark_stands_for_what_is_on_a_stream(gpu: CudaRuntime, begin: Begin, streams: list[int]) -> None:
    work = begin(streams[2], 1)
    own = OwnStreams(gpu)
    mark, other = Mark(own, streams[2], 1), Mark(own, streams[3], 1)
    wait_until(other.is_done)
    assert not mark.is_done()
    DRIVER.launch(streams[2], lambda: work.done.append("later"))
    work.finish()
    wait_until(mark.is_done)
    assert work.done[0] == "work"
    for each in (mark, other):
        each.close()
        each.close()


def test_events_are_used_again_and_go_with_what_made_them(gpu: CudaRuntime, streams: list[int]) -> None:
    own = OwnStreams(gpu)
    with captured(streams[1]):
        event = own.borrow_event(0)
        with gpu.on(0):
            gpu.record(event, streams[1])  # as if the capture had begun after this package has looked
        own.give_back_event(event, 0)
    mark, other = Mark(own, streams[0], 0), Mark(own, streams[0], 0)
    assert mark.event == event != other.event
    mark.wait()
    other.wait()
    mark.close()
    order_after(own, [NamedStream(streams[0])], 0, streams[1])
    assert DRIVER.live().events == 2
    del own, mark, other
    assert DRIVER.live().events == 2, "a finalizer asks nothing of CUDA"
    collect_all(gpu)
    assert DRIVER.live().events == 0


# Streams of our own: nobody else has one that is borrowed, and they go with what made them


def test_a_stream_is_borrowed_again_and_of_its_device(gpu: CudaRuntime) -> None:
    streams = OwnStreams(gpu)
    for device in (0, 1):
        first, second = streams.borrow(device), streams.borrow(device)
        assert first != second
        assert gpu.stream_device(first, 0) == gpu.stream_device(second, 0) == device
        streams.give_back(first, device)
        with streams.one(device) as again:
            assert again == first
            assert int(DRIVER.bindings().cuCtxGetDevice()[1]) == device
        with pytest.raises(ZeroDivisionError), streams.one(device):
            print(1 / 0)
        streams.give_back(second, device)
    assert DRIVER.live() == NOTHING._replace(streams=4)


def test_streams_go_with_what_made_them_and_what_is_on_them_is_done(gpu: CudaRuntime) -> None:
    streams = OwnStreams(gpu)
    finish, done = threading.Event(), threading.Event()

    def work() -> None:
        finish.wait(PATIENCE_S)
        done.set()

    with streams.one(1) as stream:
        DRIVER.launch(stream, work)
    del streams
    assert DRIVER.live().streams == 1, "a finalizer asks nothing of CUDA"
    collect_all(gpu)
    assert DRIVER.live() == NOTHING
    finish.set()
    assert done.wait(PATIENCE_S)


@pytest.mark.usefixtures("switching_often")
def test_no_two_threads_have_one_stream(gpu: CudaRuntime) -> None:
    streams, threads, in_use = OwnStreams(gpu), 8, Counter[int]()

    def use() -> None:
        for turn in range(200):
            with streams.one(turn % 2) as stream:
                in_use[stream] += 1
                assert in_use[stream] == 1, "it is used twice"
                assert gpu.stream_device(stream, 0) == turn % 2
                in_use[stream] -= 1

    side_by_side(*[use] * threads)
    assert DRIVER.live().streams <= 2 * threads
