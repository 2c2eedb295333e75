"""Every function of the driver that we call fails once: nothing leaks, contexts are popped, locks are free."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.ordering import Mark, OwnStreams, order_after
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.cuda.streams import NamedEvent, NamedStream
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.gpus import NOTHING, collect_all, in_another_thread

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
