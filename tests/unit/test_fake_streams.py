"""Streams of FakeCuda: what nobody has waited for is not done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel
from tests.unit.fake_gpu import (
    INTEGERS,
    INVALID_HANDLE,
    fails_by,
    in_another_thread,
    numbers,
    objects_of,
    runtime_that_gives_all_back,
)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
    assert objects_of(os.getpid()) == []


def add_one(memory: npt.NDArray[Any]) -> None:
    memory += 1


def test_what_is_launched_is_done_when_its_stream_is_synchronized_and_in_order(cuda: FakeCuda) -> None:
    done: list[int] = []
    stream = cuda.stream()
    for number in range(3):
        cuda.launch(stream, lambda number=number: done.append(number))  # type: ignore[misc]
    cuda.synchronize(cuda.current_stream().ptr)
    assert done == []
    cuda.synchronize(stream.ptr)
    cuda.synchronize(stream.ptr)
    assert done == [0, 1, 2]


def test_each_thread_and_device_has_a_current_stream_of_its_own(cuda: FakeCuda) -> None:
    here = cuda.current_stream()
    with device_guard(cuda, 1):
        on_another_device = cuda.current_stream()
    streams = {here.ptr, on_another_device.ptr, in_another_thread(cuda.current_stream).ptr, cuda.stream().ptr}
    assert len(streams) == 4
    assert cuda.current_stream() is here
    assert cuda.stream_address(here) == here.ptr > 2


def test_a_stream_is_current_within_its_block(cuda: FakeCuda) -> None:
    outer, inner = cuda.stream(), cuda.stream()
    before = cuda.current_stream()
    with outer:
        with inner:
            assert cuda.current_stream() is inner
            assert in_another_thread(cuda.current_stream) is not inner
        assert cuda.current_stream() is outer
    assert cuda.current_stream() is before


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_default_streams_numbers_mean_this_threads(cuda: FakeCuda, number: int) -> None:
    done: list[int] = []
    cuda.launch(cuda.current_stream(), lambda: done.append(number))
    with cuda.stream():
        cuda.synchronize(number)
    assert done == [number]


def test_a_stream_waits_for_what_was_on_another_when_they_were_ordered(cuda: FakeCuda) -> None:
    first, then, done = cuda.stream(), cuda.stream(), list[str]()
    cuda.launch(then, lambda: done.append("before the order"))
    cuda.launch(first, lambda: done.append("waited for"))
    cuda.order(first.ptr, then.ptr)
    cuda.launch(first, lambda: done.append("put later on the first"))
    cuda.launch(then, lambda: done.append("after the order"))
    cuda.synchronize(then.ptr)
    assert done == ["before the order", "waited for", "after the order"]
    cuda.synchronize(first.ptr)
    assert done[3:] == ["put later on the first"]


def test_waiting_for_what_another_stream_has_done_does_not_wait_for_what_it_is_doing(cuda: FakeCuda) -> None:
    first, then = cuda.stream(), cuda.stream()
    is_doing, goes_on, outcome = threading.Event(), threading.Event(), list[bool]()
    cuda.launch(first, lambda: None)
    cuda.order(first.ptr, then.ptr)
    cuda.launch(then, goes_on.set)
    first.synchronize()

    def long_work() -> None:
        is_doing.set()
        outcome.append(goes_on.wait(5))

    cuda.launch(first, long_work)
    with ThreadPoolExecutor(1) as pool:
        synchronized = pool.submit(first.synchronize)
        assert is_doing.wait(5)
        then.synchronize()
        synchronized.result()
    assert outcome == [True]


def test_streams_may_wait_for_each_other_in_turn(cuda: FakeCuda) -> None:
    one, other, done = cuda.stream(), cuda.stream(), list[str]()
    cuda.launch(one, lambda: done.append("one"))
    cuda.order(one.ptr, other.ptr)
    cuda.launch(other, lambda: done.append("other"))
    cuda.order(other.ptr, one.ptr)
    cuda.launch(one, lambda: done.append("one again"))
    one.synchronize()
    assert done == ["one", "other", "one again"]


@pytest.mark.parametrize(("method", "streams"), [("synchronize", [3]), ("order", [3, 1]), ("order", [1, 3])])
def test_a_stream_that_there_is_not_is_refused(cuda: FakeCuda, method: str, streams: list[int]) -> None:
    with fails_by(INVALID_HANDLE):
        getattr(cuda, method)(*streams)


def test_work_of_a_stream_that_is_destroyed_is_done_and_waited_for_by_who_frees_memory(cuda: FakeCuda) -> None:
    done: list[str] = []
    with cuda.stream() as stream:
        cuda.launch(stream, lambda: done.append("work"))
    cuda.destroy_stream(stream.ptr)
    assert done == []
    with fails_by(INVALID_HANDLE):
        cuda.synchronize(stream.ptr)
    cuda.free(cuda.allocate(1))
    assert done == ["work"]


def test_what_comes_after_a_recording_is_not_done_with_it(cuda: FakeCuda) -> None:
    """So an event that is recorded again and again need never be done."""
    done: list[str] = []
    event, stream = cuda.create_event(), cuda.current_stream()
    cuda.launch(stream, lambda: done.append("before"))
    cuda.record(event, stream.ptr)
    cuda.launch(stream, lambda: done.append("after"))
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert done == ["before"]
    assert cuda.is_event_done(event)
    cuda.destroy_event(event)


def test_nothing_is_launched_on_the_stream_of_a_device_that_is_not_current(cuda: FakeCuda) -> None:
    stream = cuda.stream()
    with device_guard(cuda, 1):
        with fails_by(INVALID_HANDLE):
            cuda.launch(stream, lambda: None)
        cuda.synchronize(stream.ptr)


def test_a_failure_on_a_stream_shows_when_it_is_synchronized(cuda: FakeCuda) -> None:
    done: list[str] = []
    cuda.launch(cuda.current_stream(), lambda: print(1 / 0))
    cuda.launch(cuda.current_stream(), lambda: done.append("after it"))
    with pytest.raises(ZeroDivisionError):
        cuda.current_stream().synchronize()
    cuda.current_stream().synchronize()
    assert done == ["after it"]


# Copies


def test_a_copy_within_the_gpu_is_done_when_its_stream_is_synchronized(cuda: FakeCuda) -> None:
    source, target = numbers(cuda, 2, 3), cuda.empty((2, 3), INTEGERS)
    stream = cuda.stream()
    cuda.copy(target, source, stream.ptr)
    assert (target.get() != source.get()).all()
    cuda.synchronize(stream.ptr)
    assert (target.get() == source.get()).all()


def test_memory_of_the_host_that_is_not_pinned_may_be_reused_at_once(cuda: FakeCuda) -> None:
    host, device = np.arange(3, dtype=INTEGERS), cuda.empty((3,), INTEGERS)
    cuda.copy(device, host, cuda.current_stream().ptr)
    host[:] = 0
    assert device.get().tolist() == [0, 1, 2]


def test_a_copy_to_memory_of_the_host_that_is_not_pinned_comes_after_what_is_on_the_stream(cuda: FakeCuda) -> None:
    host, device = np.zeros(3, INTEGERS), numbers(cuda, 3)
    kernel(add_one, device)
    cuda.copy(host, device, cuda.current_stream().ptr)
    assert host.tolist() == [1, 2, 3]


def test_a_copy_of_pinned_memory_is_done_when_its_stream_is_synchronized(cuda: FakeCuda) -> None:
    host, device, stream = np.zeros(3, INTEGERS), numbers(cuda, 3), cuda.current_stream()
    cuda.pin(host.ctypes.data, host.nbytes)
    cuda.copy(host, device, stream.ptr)
    assert not host.any()
    cuda.synchronize(stream.ptr)
    assert host.tolist() == [0, 1, 2]
    cuda.copy(device, host, stream.ptr)
    host[:] = 7
    assert device.get().tolist() == [7, 7, 7]
    cuda.unpin(host.ctypes.data)


def test_memory_of_which_only_a_part_is_pinned_counts_as_not_pinned(cuda: FakeCuda) -> None:
    host = np.zeros(3, INTEGERS)
    cuda.pin(host.ctypes.data, 8)
    cuda.copy(host, numbers(cuda, 3), cuda.current_stream().ptr)
    assert host.tolist() == [0, 1, 2]
    cuda.unpin(host.ctypes.data)


def test_only_arrays_of_one_shape_and_type_are_copied_and_not_within_the_host(cuda: FakeCuda) -> None:
    target = cuda.empty((2,), INTEGERS)
    for source in (np.zeros(3, INTEGERS), np.zeros(2, np.float32)):
        with pytest.raises(ValueError, match="cannot be copied to one of int32 \\(2,\\)"):
            cuda.copy(target, source, 1)
    with pytest.raises(TypeError, match="both arrays are NumPy's"):
        cuda.copy(np.zeros(2), np.zeros(2), 1)


def test_memory_is_pinned_once(cuda: FakeCuda) -> None:
    cuda.pin(4096, 100)
    with fails_by("cudaErrorHostMemoryAlreadyRegistered"):
        cuda.pin(4096 + 99, 100)
    cuda.pin(4096 + 100, 100)
    cuda.unpin(4096)
    cuda.unpin(4096 + 100)
    with fails_by("cudaErrorHostMemoryNotRegistered"):
        cuda.unpin(4096)
