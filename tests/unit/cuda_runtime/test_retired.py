"""What is to be done when a GPU has finished: finalizers put it there and wait for nothing, and others do it."""

from __future__ import annotations

import contextlib
import functools
import gc
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.gpus import NOTHING, PATIENCE_S, collect_all, run_in_a_process, switching_often

LOST = 9
"""The virtual process that loses a device."""


@pytest.fixture
def busy(driver: FakeDriver, gpu: CudaRuntime) -> Iterator[threading.Event]:
    """Something that device 1 does, until this is set."""
    stream, finish = gpu.create_stream(1), threading.Event()
    driver.launch(stream, lambda: finish.wait(PATIENCE_S))
    yield finish
    finish.set()
    gpu.synchronize_stream(stream, 1)
    gpu.destroy_stream(stream, 1)


def test_work_comes_after_all_that_the_device_did_before(gpu: CudaRuntime, busy: threading.Event) -> None:
    done: list[str] = []
    gpu.retired.add(1, lambda: done.append("one"))
    gpu.retired.add(1, lambda: done.append("two"))
    for _ in range(5):
        assert gpu.retired.collect()
        time.sleep(0.002)
    assert (done, gpu.retired.is_waiting) == ([], True)
    busy.set()
    collect_all(gpu)
    assert (done, gpu.retired.is_waiting) == (["one", "two"], False)


def test_letting_go_asks_nothing_of_cuda(
    driver: FakeDriver, gpu: CudaRuntime, peer: CudaRuntime, busy: threading.Event
) -> None:
    allocation = CudaAllocation(gpu, 1, 1)
    mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None, allocation.event_handle)
    asked = driver.count("cuCtxPushCurrent")
    driver.fail_next("cuCtxPushCurrent", "CUDA_ERROR_UNKNOWN")
    driver.fail_next("cuCtxRecordEvent", "CUDA_ERROR_UNKNOWN")
    mapping.close()
    del mapping
    allocation.free()
    gc.collect()
    assert driver.count("cuCtxPushCurrent") == asked
    busy.set()
    collect_all(peer)
    collect_all(gpu)
    assert driver.live() == LiveCounts(streams=1)


@pytest.mark.parametrize("holder", ["retired", "contexts", "mappings"])
def test_letting_go_waits_for_no_lock(gpu: CudaRuntime, peer: CudaRuntime, holder: str) -> None:
    """A finalizer may interrupt whatever holds one, in the same thread."""
    mappings = CudaMappings(peer)
    allocation = CudaAllocation(gpu, 1, 1)
    mapping = mappings.map(allocation.handle, 1, 1, "memory")
    locks: dict[str, contextlib.AbstractContextManager[object]] = {
        "retired": peer.retired._lock,
        "contexts": peer._lock,
        "mappings": mappings._lock,
    }

    with locks[holder]:
        mapping.close()  # would wait for ever
        del mapping
    collect_all(peer)


def test_one_thread_at_a_time_collects_and_none_waits_for_it(gpu: CudaRuntime) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(PATIENCE_S)

    gpu.retired.add_idle(work)
    other = threading.Thread(target=gpu.retired.collect)
    other.start()
    assert inside.wait(PATIENCE_S)
    assert gpu.retired.collect(), "something is left: what the other thread is at"
    assert other.is_alive()
    go_on.set()
    other.join(PATIENCE_S)
    assert not gpu.retired.collect()


def test_work_may_let_go_of_more(gpu: CudaRuntime) -> None:
    done: list[str] = []

    def work() -> None:
        done.append("first")
        assert gpu.retired.collect()  # as a finalizer might
        gpu.retired.add(0, lambda: done.append("second"))

    gpu.retired.add(0, work)
    collect_all(gpu)
    assert done == ["first", "second"]


def test_work_that_cuda_refuses_does_not_stop_the_rest(gpu: CudaRuntime) -> None:
    done: list[str] = []

    def refused() -> None:
        raise CudaError("unmapping", "CUDA_ERROR_MAP_FAILED")

    for add in (gpu.retired.add_idle, lambda work: gpu.retired.add(0, work)):
        add(refused)
        add(lambda: done.append("next"))
    collect_all(gpu)
    assert done == ["next", "next"]


def test_work_that_raises_something_else_loses_nothing_of_the_rest(gpu: CudaRuntime) -> None:
    done: list[str] = []
    gpu.retired.add_idle(lambda: print(1 / 0))
    gpu.retired.add_idle(lambda: done.append("next"))
    with pytest.raises(ZeroDivisionError):
        gpu.retired.collect()
    collect_all(gpu)
    assert done == ["next"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("cuEventCreate", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCtxRecordEvent", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("cuEventQuery", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("cuEventQuery", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_what_cannot_be_asked_now_is_asked_again(
    driver: FakeDriver, gpu: CudaRuntime, function: str, name: str
) -> None:
    done: list[str] = []
    gpu.retired.add(1, lambda: done.append("work"))
    driver.fail_next(function, name, times=3)
    assert gpu.retired.collect()
    collect_all(gpu)
    assert done == ["work"]
    assert driver.live() == NOTHING


@pytest.mark.parametrize("function", ["cuEventCreate", "cuCtxRecordEvent", "cuEventQuery"])
def test_what_a_lost_device_has_is_left_as_it_is(driver: FakeDriver, function: str) -> None:
    """Nobody can know any more what its memory is used for; nor is anybody to ask for ever."""
    gpu = driver.runtime(LOST)
    done: list[str] = []
    driver.fail_next(function, "CUDA_ERROR_ILLEGAL_ADDRESS", process=LOST)
    gpu.retired.add(1, lambda: done.append("work"))
    collect_all(gpu)
    assert done == []
    gpu.retired.add(0, lambda: done.append("other"))
    collect_all(gpu)
    assert done == ["other"]
    driver.end(LOST)  # the event that was asked for is left


def test_threads_that_let_go_and_collect_do_everything_once(gpu: CudaRuntime) -> None:
    done: list[int] = []

    def let_go(first: int) -> None:
        for number in range(first, first + 300):
            gpu.retired.add(number % 2, functools.partial(done.append, number))
            gpu.retired.collect()

    threads = [threading.Thread(target=let_go, args=(1000 * index,)) for index in range(4)]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    collect_all(gpu)
    assert sorted(done) == sorted(1000 * index + number for index in range(4) for number in range(300))


FORKING = """
import os, threading
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.ordering import OwnStreams
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import in_forked_child

driver = FakeDriver.load()
gpu, peer = driver.runtime(0), driver.runtime(1)
allocation = CudaAllocation(gpu, 1, 1)
mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None, allocation.event_handle)
streams = OwnStreams(peer)
streams.give_back(streams.borrow(1), 1)
"""

USES = {
    "lets go of nothing that is its parent's": """
        def work():
            global mapping, streams, allocation
            mapping.close()
            allocation.free()
            del mapping, streams, allocation
            assert not peer.retired.is_waiting and not gpu.retired.is_waiting
        in_forked_child(work)
        assert driver.live().opened == 1 and driver.live().allocations == 1
    """,
    "does nothing that its parent has to do": """
        done = []
        gpu.retired.add(1, lambda: done.append("work"))
        def work():
            assert not gpu.retired.collect()
            assert done == []
        in_forked_child(work)
        while gpu.retired.collect():
            pass
        assert done == ["work"]
    """,
    "waits for no lock that its parent's other threads had": """
        held, go_on = threading.Event(), threading.Event()
        def hold():
            with gpu.retired._lock, gpu._lock:
                held.set()
                go_on.wait(20)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        def work():
            assert not gpu.retired.collect()
            try:
                with gpu.on(0):
                    raise AssertionError("CUDA works in a forked child")
            except CudaError as error:
                assert "was forked from one that uses CUDA" in str(error), error
        in_forked_child(work)
        go_on.set()
        thread.join()
    """,
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child(use: str) -> None:
    run_in_a_process(FORKING + textwrap.dedent(USES[use]))
