"""Streams: what is on one is done late, and in CUDA's order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of, primary

LATE = 0.05
BLOCKING, NON_BLOCKING = 0, 1


def noted(driver: FakeDriver, order: list[str]) -> Callable[[str, Any], None]:
    """Return a function that puts a word on a stream, which is noted when its turn has come."""

    def put(word: str, stream: Any) -> None:
        driver.launch(int(stream), lambda: order.append(word))

    return put


def test_what_is_on_a_stream_is_done_late(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(LATE)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAlloc(16))
    words = np.arange(4, dtype=np.int32)
    began = time.monotonic()
    done(cuda.cuMemcpyHtoDAsync(address, words.ctypes.data, 16, stream))
    words[:] = 9  # pageable memory was read already
    assert time.monotonic() - began < LATE
    assert name_of(cuda.cuStreamQuery(stream)) == "NOT_READY"
    assert driver.memory(int(address), (4,), np.int32).tolist() != [0, 1, 2, 3]
    done(cuda.cuStreamSynchronize(stream))
    assert time.monotonic() - began >= LATE
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


def test_streams_do_not_wait_for_each_other(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    driver.delay(0)
    first, second = (done(cuda.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
    gate = threading.Event()
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    noted(driver, order)("second", second)
    done(cuda.cuStreamSynchronize(second))
    assert order == ["second"]
    gate.set()
    done(cuda.cuStreamSynchronize(first))
    assert order == ["second", "True"]
    for stream in (first, second):
        done(cuda.cuStreamDestroy(stream))


@pytest.mark.parametrize("default", [0, 1])
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    cuda: Any, driver: FakeDriver, default: int
) -> None:
    order: list[str] = []
    put = noted(driver, order)
    driver.delay(0.01)
    first, second = (done(cuda.cuStreamCreate(BLOCKING)) for _ in range(2))
    gate = threading.Event()
    driver.launch(int(first), lambda: order.append(str(gate.wait(10))))
    put("default", default)
    put("second", second)
    time.sleep(0.05)
    assert order == []
    gate.set()
    done(cuda.cuStreamSynchronize(second))
    assert order == ["True", "default", "second"]
    for stream in (first, second):
        done(cuda.cuStreamDestroy(stream))


def test_non_blocking_streams_are_not_ordered_with_the_legacy_stream(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    driver.delay(0)
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    gate = threading.Event()
    driver.launch(int(stream), lambda: order.append(str(gate.wait(10))))
    noted(driver, order)("default", 0)
    done(cuda.cuStreamSynchronize(0))
    assert order == ["default"]
    gate.set()
    done(cuda.cuCtxSynchronize())
    assert order == ["default", "True"]
    done(cuda.cuStreamDestroy(stream))


def test_each_thread_has_a_default_stream(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    driver.delay(0)
    gate = threading.Event()
    driver.launch(2, lambda: order.append(str(gate.wait(10))))

    def elsewhere() -> None:
        primary(cuda, 0)
        noted(driver, order)("elsewhere", 2)
        done(cuda.cuStreamSynchronize(2))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert order == ["elsewhere"]
    gate.set()
    done(cuda.cuCtxSynchronize())


def test_devices_do_not_wait_for_each_other(cuda: Any, driver: FakeDriver) -> None:
    gate = threading.Event()
    driver.launch(0, lambda: gate.wait(10))
    with cuda.context(1):
        done(cuda.cuCtxSynchronize())
        done(cuda.cuStreamSynchronize(0))
    assert name_of(cuda.cuStreamQuery(0)) == "NOT_READY"
    gate.set()
    done(cuda.cuCtxSynchronize())


def test_a_stream_knows_its_context(cuda: Any) -> None:
    with cuda.context(1):
        stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    context = done(cuda.cuStreamGetCtx(stream))
    context = context[0] if isinstance(context, tuple) else context
    done(cuda.cuCtxPushCurrent(context))
    assert int(done(cuda.cuCtxGetDevice())) == 1
    done(cuda.cuCtxPopCurrent())
    assert int(done(cuda.cuStreamGetDevice(stream))) == 1
    done(cuda.cuStreamDestroy(stream))


def test_a_destroyed_stream_does_what_was_on_it(cuda: Any, driver: FakeDriver) -> None:
    order: list[str] = []
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    noted(driver, order)("done", stream)
    done(cuda.cuStreamDestroy(stream))
    done(cuda.cuCtxSynchronize())
    assert order == ["done"]
    assert name_of(cuda.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert driver.violations() == ["a stream was used that is destroyed, or never was"]
    driver.forget()


def test_streams_of_another_process_are_none(cuda: Any, other: Any, driver: FakeDriver) -> None:
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    assert name_of(other.cuStreamSynchronize(stream)) == "INVALID_HANDLE"
    driver.forget()
    done(cuda.cuStreamDestroy(stream))


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


def test_memory_of_the_pool_is_freed_in_the_order_of_its_stream(cuda: Any, driver: FakeDriver) -> None:
    stream = done(cuda.cuStreamCreate(NON_BLOCKING))
    address = done(cuda.cuMemAllocAsync(16, stream))
    done(cuda.cuMemsetD8Async(address, 1, 16, stream))
    done(cuda.cuMemFreeAsync(address, stream))
    done(cuda.cuStreamSynchronize(stream))
    assert driver.live(0).allocations == 0
    done(cuda.cuStreamDestroy(stream))
