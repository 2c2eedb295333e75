"""What a thread does that may wait for GPUs. Each function of the driver fails once, and nothing leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
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
from shm_backend_utils.gpu.ordering import Mark, OwnStreams, do_after_all_work, order_after
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.gpu.streams import NamedEvent, NamedStream
from tests.unit.gpu.fakes import DRIVER, NOTHING, PATIENCE_S, collect_all, held_back, stream_on, wait_until
from tests.unit.side_by_side import side_by_side


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def busy(gpu: CudaRuntime) -> Iterator[threading.Event]:
    with stream_on(gpu, 1) as stream, held_back(stream) as finish:
        yield finish


def test_memory_is_freed_when_its_device_is_done_and_nobody_else_waits(gpu: CudaRuntime, busy: threading.Event) -> None:
    address = gpu.allocate(1, 1)
    gpu.retired.add(functools.partial(gpu.free, address, 1))
    gpu.retired.collect_soon()
    for _ in range(5):
        assert gpu.retired.collect(), "the other thread is at it"
        gpu.retired.collect_soon()
        time.sleep(0.002)
    assert DRIVER.live().allocations == 1
    busy.set()
    gpu.retired.collect_now()
    assert DRIVER.live().allocations == 0


@pytest.mark.parametrize("holder", ["retired", "contexts", "mappings"])
def test_letting_go_waits_for_nothing(gpu: CudaRuntime, peer: CudaRuntime, busy: threading.Event, holder: str) -> None:
    """A finalizer may interrupt whatever holds one, in the same thread."""
    mappings, allocation = CudaMappings(peer), CudaAllocation(gpu, 1, 1)
    mapping = mappings.map(allocation.handle, 1, 1, "memory", None)
    lock: Any = {"retired": peer.retired._lock, "contexts": peer._lock, "mappings": mappings._lock}[holder]
    asked = DRIVER.count("cuCtxPushCurrent")
    with lock:
        mapping.close()  # would wait for ever
        del mapping
        allocation.free()
        gc.collect()
    assert DRIVER.count("cuCtxPushCurrent") == asked
    busy.set()
    collect_all(peer)
    collect_all(gpu)
    assert DRIVER.live() == NOTHING._replace(streams=1)


def test_one_thread_at_a_time_collects_and_none_waits_for_it(gpu: CudaRuntime) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(PATIENCE_S)

    gpu.retired.add(work)
    other = threading.Thread(target=gpu.retired.collect)
    other.start()
    assert inside.wait(PATIENCE_S)
    assert gpu.retired.collect(), "something is left: what the other thread is at"
    assert other.is_alive()
    go_on.set()
    other.join(PATIENCE_S)
    assert not gpu.retired.collect()


def test_work_may_let_go_of_more(gpu: CudaRuntime, done: list[str]) -> None:
    def work() -> None:
        done.append("first")
        assert gpu.retired.collect()  # as a finalizer might
        gpu.retired.add(lambda: done.append("second"))

    gpu.retired.add(work)
    collect_all(gpu)
    assert done == ["first", "second"]


def test_work_that_fails_does_not_stop_the_rest(gpu: CudaRuntime, done: list[str]) -> None:
    def refused() -> None:
        raise CudaError("unmapping", "CUDA_ERROR_MAP_FAILED")

    gpu.retired.add(refused)
    gpu.retired.add(lambda: done.append("next"))
    collect_all(gpu)
    gpu.retired.add(lambda: print(1 / 0))
    gpu.retired.add(lambda: done.append("next"))
    with pytest.raises(ZeroDivisionError):
        gpu.retired.collect()
    collect_all(gpu)
    assert done == ["next"] * 2


def test_work_is_left_undone_if_the_wait_fails_but_not_for_a_capture(gpu: CudaRuntime, done: list[str]) -> None:
    names = ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_UNKNOWN"]
    for name in names:
        DRIVER.fail_next("cuMemAlloc", name, times=2)
        do_after_all_work(gpu, (1,), functools.partial(done.append, name))
        collect_all(gpu)
        DRIVER.forget()
    assert done == names[:1]


@pytest.mark.usefixtures("switching_often")
def test_threads_that_let_go_and_collect_do_everything_once(gpu: CudaRuntime) -> None:
    done: list[int] = []

    def let_go(first: int) -> None:
        for number in range(first, first + 300):
            gpu.retired.add(functools.partial(done.append, number))
            gpu.retired.collect()

    side_by_side(*[functools.partial(let_go, 1000 * index) for index in range(4)])
    collect_all(gpu)
    assert sorted(done) == sorted(1000 * index + number for index in range(4) for number in range(300))


def share(gpu: CudaRuntime, peer: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, 1, 1)
    mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None)
    mapping.close()
    del mapping
    collect_all(peer)
    allocation.free()


def use(gpu: CudaRuntime, _: CudaRuntime) -> None:
    allocation, host = CudaAllocation(gpu, 1, 1), np.zeros(4096, np.uint8)
    gpu.pointer(allocation.address)
    gpu.pin(host.ctypes.data, 4096)
    gpu.unpin(host.ctypes.data)
    own = OwnStreams(gpu)
    with own.one(1) as first, own.one(1) as then:
        gpu.copy(allocation.address, host.ctypes.data, 100, first)
        gpu.copy_rows(allocation.address, 10, host.ctypes.data, 20, 5, 2, first)
        gpu.synchronize_stream(first, 1)
        for runtime in (gpu, CudaRuntime(gpu._driver)):  # which has used no GPU yet
            assert runtime.stream_device(first, 0) == 1
        order_after(own, [], 1, then)
        order_after(own, [NamedStream(first), NamedStream(1)], 1, then)
        event = gpu.create_event(1)
        try:
            gpu.record(event, first)
            order_after(own, [NamedEvent(event)], 1, then)
            wait_until(lambda: gpu.is_event_done(event))
        finally:
            gpu.destroy_event(event, 1)
        with contextlib.closing(Mark(own, then, 1)) as mark:
            wait_until(mark.is_done)
    gpu.synchronize_device(1)


WORKS: dict[Callable[[CudaRuntime, CudaRuntime], None], str] = {
    share: "cuCtxPushCurrent cuMemAlloc cuIpcGetMemHandle cuIpcOpenMemHandle cuMemGetAddressRange "
    "cuThreadExchangeStreamCaptureMode cuPointerGetAttributes",
    use: "cuPointerGetAttributes cuMemHostRegister cuCtxGetCurrent cuStreamCreate cuMemcpyAsync cuMemcpy2DAsync "
    "cuEventSynchronize cuCtxSynchronize cuCtxRecordEvent cuEventCreate cuEventRecord cuStreamWaitEvent cuEventQuery "
    "cuStreamIsCapturing cuStreamGetCtx cuCtxGetDevice",
}


@pytest.mark.parametrize(
    ("do", "function"), [(work, function) for work, functions in WORKS.items() for function in functions.split()]
)
def test_a_function_that_fails_leaves_nothing(gpu: CudaRuntime, peer: CudaRuntime, do: Any, function: str) -> None:
    do(gpu, peer)
    collect_all(gpu)
    calls = 0
    while True:
        with failing((gpu, peer), function, calls) as failed:
            with contextlib.suppress(CudaError, RegionRefusedError):
                do(gpu, peer)
            collect_all(peer)
            collect_all(gpu)
        gc.collect()  # the error has had the frames, and what they hold
        collect_all(peer)
        collect_all(gpu)
        assert DRIVER.depth() == 0
        assert DRIVER.live() == NOTHING, f"call {calls} of {function} left something"
        if not failed:
            break
        calls += 1
    assert calls, f"{function} is not called here"
    do(gpu, peer)
    captures = DRIVER.bindings()  # the mode of this thread, where CUDA refused to change it back
    captures.cuThreadExchangeStreamCaptureMode(captures.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)


@contextlib.contextmanager
def failing(runtimes: Iterable[CudaRuntime], function: str, after: int) -> Iterator[list[str]]:
    calls, failed = itertools.count(), []
    counted = [(runtime._driver, getattr(runtime._driver, function)) for runtime in runtimes]

    def replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any) -> Any:
            if not is_giving_back() and next(calls) == after:
                failed.append(function)
                DRIVER.fail_next(function, "CUDA_ERROR_OUT_OF_MEMORY")
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
