"""What is to be done when a GPU has finished. Each function of the driver fails once, and nothing leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.ordering import Mark, OwnStreams, order_after
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import NamedEvent, NamedStream
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.gpus import NOTHING, PATIENCE_S, collect_all, in_another_thread, run_in_a_process, switching_often

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
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.ordering import OwnStreams
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


Work = Callable[[CudaRuntime, CudaRuntime], None]


def share(gpu: CudaRuntime, peer: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, 1, 1)
    mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None, allocation.event_handle)
    mapping.close()
    del mapping
    collect_all(peer)
    allocation.free()


def share_in_another_thread(gpu: CudaRuntime, peer: CudaRuntime) -> None:
    in_another_thread(lambda: share(gpu, peer))


def copy(gpu: CudaRuntime, _: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, 1, 1)
    host = np.zeros(100, np.uint8)
    with OwnStreams(gpu).one(1) as stream:
        gpu.copy(allocation.address, host.ctypes.data, 100, stream)
        gpu.copy_rows(allocation.address, 10, host.ctypes.data, 20, 5, 2, stream)
        gpu.synchronize_stream(stream, 1)
    gpu.synchronize_device(1)


def order(gpu: CudaRuntime, _: CudaRuntime) -> None:
    with OwnStreams(gpu).one(1) as first, OwnStreams(gpu).one(1) as then:
        order_after(gpu, [], 1, then)
        order_after(gpu, [NamedStream(first), NamedStream(1)], 1, then)
        event = gpu.create_event(1)
        try:
            gpu.record(event, first)
            order_after(gpu, [NamedEvent(event)], 1, then)
            gpu.synchronize_event(event)
        finally:
            gpu.destroy_event(event, 1)
        with Mark(gpu, then, 1) as mark:
            mark.wait()
            assert mark.is_done()


def ask(gpu: CudaRuntime, _: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, 1, 1)
    gpu.pointer(allocation.address)
    gpu.extent(allocation.address, 1)
    gpu.device_count()
    with gpu.on(1), OwnStreams(gpu).one(0) as stream:
        assert gpu.stream_device(stream, 1) == 0
        assert not gpu.is_capturing(stream)


def pin(gpu: CudaRuntime, _: CudaRuntime) -> None:
    room = np.zeros(3 * 4096, np.uint8)
    address = room.ctypes.data + -room.ctypes.data % 4096
    gpu.pin(address, 4096)
    gpu.unpin(address)


WORKS: dict[str, tuple[Work, str]] = {
    "share": (
        share,
        "cuCtxPushCurrent cuEventCreate cuMemAlloc cuIpcGetMemHandle cuIpcGetEventHandle cuIpcOpenMemHandle "
        "cuMemGetAddressRange cuIpcOpenEventHandle cuCtxRecordEvent cuEventQuery cuThreadExchangeStreamCaptureMode "
        "cuPointerGetAttribute",
    ),
    "share in another thread": (share_in_another_thread, "cuCtxPushCurrent cuIpcOpenMemHandle cuMemGetAddressRange"),
    "copy": (copy, "cuStreamCreate cuMemcpyAsync cuMemcpy2DAsync cuStreamSynchronize cuCtxSynchronize"),
    "order": (
        order,
        "cuCtxRecordEvent cuEventCreate cuEventRecord cuStreamWaitEvent cuEventQuery cuStreamIsCapturing "
        "cuEventSynchronize cuStreamGetCtx",
    ),
    "ask": (ask, "cuPointerGetAttribute cuMemGetAddressRange cuDeviceGetCount cuStreamGetCtx cuCtxGetDevice"),
    "pin": (pin, "cuMemHostRegister cuCtxGetCurrent cuCtxPushCurrent"),
}


@pytest.mark.parametrize(
    ("work", "function"), [(work, function) for work, (_, functions) in WORKS.items() for function in functions.split()]
)
def test_a_function_that_fails_leaves_nothing(
    driver: FakeDriver, gpu: CudaRuntime, peer: CudaRuntime, work: str, function: str
) -> None:
    do, _ = WORKS[work]
    do(gpu, peer)
    collect_all(gpu)
    calls = 0
    while True:
        with failing(driver, (gpu, peer), function, calls) as failed:
            with contextlib.suppress(CudaError, RegionRefusedError):
                do(gpu, peer)
            collect_all(peer)
            collect_all(gpu)
        gc.collect()  # the error has had the frames, and what they hold
        collect_all(peer)
        collect_all(gpu)
        assert driver.depth() == 0
        assert driver.live() == NOTHING, f"call {calls} of {function} left something"
        if not failed:
            break
        calls += 1
    assert calls, f"{function} is not called here"
    do(gpu, peer)
    captures = driver.bindings()  # the mode of this thread, where CUDA refused to change it back
    captures.cuThreadExchangeStreamCaptureMode(captures.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)


@contextlib.contextmanager
def failing(driver: FakeDriver, runtimes: Iterable[CudaRuntime], function: str, after: int) -> Iterator[list[str]]:
    """Let one call of a function fail in the block, after so many that do not. Yield a list that has it then."""
    calls, failed = itertools.count(), []
    counted = [(runtime._driver, getattr(runtime._driver, function)) for runtime in runtimes]

    def replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any) -> Any:
            if not is_giving_back() and next(calls) == after:
                failed.append(function)
                driver.fail_next(function, "CUDA_ERROR_OUT_OF_MEMORY")
            return call(*arguments)

        return one

    for bindings, call in counted:
        setattr(bindings, function, replaced(call))
    yield failed
    for bindings, call in counted:
        setattr(bindings, function, call)


def is_giving_back() -> bool:
    """Return whether something is being given back: if CUDA refuses that, it is left as it is."""
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_code.co_name in ("free", "close", "destroy_event", "destroy_stream", "unpin"):
            return True
        frame = frame.f_back
    return False
