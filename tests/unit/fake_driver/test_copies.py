"""Copies and fills: any kinds of memory, strided ones, and those that leave their allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of, numbers

WORDS = np.arange(4, dtype=np.int32)


def filled_memory(cuda: Any, byte_size: int = 64) -> int:
    address = int(done(cuda.cuMemAlloc(byte_size)))
    done(cuda.cuMemcpyHtoD(address, WORDS.ctypes.data, 16))
    return address


def test_unified_addresses_say_what_they_are(cuda: Any, driver: FakeDriver) -> None:
    source, target, back = filled_memory(cuda), done(cuda.cuMemAlloc(64)), np.zeros(4, np.int32)
    done(cuda.cuMemcpyAsync(target, source, 16, 0))
    done(cuda.cuMemcpyAsync(back.ctypes.data, target, 16, 0))  # pageable: it is written when this returns
    assert back.tolist() == WORDS.tolist()
    for address in (source, target):
        done(cuda.cuMemFree(address))


def test_a_copy_within_devices_is_not_waited_for(cuda: Any, driver: FakeDriver) -> None:
    driver.delay(0.05)
    source, target = filled_memory(cuda), done(cuda.cuMemAlloc(64))
    done(cuda.cuMemcpyDtoD(target, source, 16))
    assert numbers(driver, target).tolist() != WORDS.tolist()
    done(cuda.cuStreamSynchronize(0))
    assert numbers(driver, target).tolist() == WORDS.tolist()
    for address in (source, target):
        done(cuda.cuMemFree(address))


def test_copies_between_devices(cuda: Any, driver: FakeDriver) -> None:
    source = filled_memory(cuda)
    with cuda.context(1):
        target = int(done(cuda.cuMemAlloc(64)))
        done(cuda.cuMemcpyAsync(target, source, 16, 0))
        done(cuda.cuStreamSynchronize(0))
        assert numbers(driver, target).tolist() == WORDS.tolist()
        done(cuda.cuMemFree(target))
    done(cuda.cuMemFree(source))


@pytest.mark.parametrize("is_late", [False, True])
def test_rows(cuda: Any, driver: FakeDriver, is_late: bool) -> None:
    address = int(done(cuda.cuMemAlloc(64)))
    values = np.arange(24, dtype=np.uint8).reshape(4, 6)
    plan = cuda.CUDA_MEMCPY2D()
    plan.srcMemoryType = plan.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    plan.srcDevice, plan.srcPitch = values.ctypes.data + 1, 6
    plan.dstDevice, plan.dstPitch = address, 16
    plan.WidthInBytes, plan.Height = 3, 4
    done(cuda.cuMemcpy2DAsync(plan, 0) if is_late else cuda.cuMemcpy2D(plan))
    done(cuda.cuStreamSynchronize(0))
    assert driver.memory(address, (4, 16), np.uint8)[:, :3].tolist() == values[:, 1:4].tolist()
    plan.dstPitch = 2
    assert name_of(cuda.cuMemcpy2DAsync(plan, 0)) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


def test_fills(cuda: Any, driver: FakeDriver) -> None:
    address = filled_memory(cuda)
    done(cuda.cuMemsetD8Async(address, 1, 4, 0))
    done(cuda.cuMemsetD32(address + 4, 7, 2))
    done(cuda.cuStreamSynchronize(0))
    assert numbers(driver, address).tolist() == [0x01010101, 7, 7, 3]
    done(cuda.cuMemFree(address))


def test_a_copy_beyond_its_allocation_spoils_the_context(cuda: Any, driver: FakeDriver) -> None:
    address, target = filled_memory(cuda, 512), done(cuda.cuMemAlloc(4096))
    done(cuda.cuMemcpyDtoDAsync(target, address, 513, 0))
    assert name_of(cuda.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    assert name_of(cuda.cuMemAlloc(4)) == "ILLEGAL_ADDRESS"
    assert name_of(cuda.cuStreamQuery(0)) == "ILLEGAL_ADDRESS"
    with cuda.context(1):
        done(cuda.cuCtxSynchronize())
    done(cuda.cuDevicePrimaryCtxReset(0))
    for memory in (address, target):
        done(cuda.cuMemFree(memory))


def test_events_after_an_error_do_not_hang(cuda: Any, driver: FakeDriver) -> None:
    address, event = filled_memory(cuda, 512), done(cuda.cuEventCreate(2))
    done(cuda.cuMemsetD8Async(address, 0, 513, 0))
    cuda.cuEventRecord(event, 0)
    assert name_of(cuda.cuEventSynchronize(event)) == "ILLEGAL_ADDRESS"
    done(cuda.cuDevicePrimaryCtxReset(0))
    done(cuda.cuEventDestroy(event))
    done(cuda.cuMemFree(address))


def test_memory_that_was_closed_under_a_copy(cuda: Any, other: Any, driver: FakeDriver) -> None:
    driver.delay(0.05)
    address = int(done(cuda.cuMemAlloc(2 << 20)))
    opened = done(other.cuIpcOpenMemHandle(done(cuda.cuIpcGetMemHandle(address)), 1))
    done(other.cuMemsetD8Async(opened, 0, 16, 0))
    done(other.cuIpcCloseMemHandle(opened))
    assert name_of(other.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"
    done(other.cuDevicePrimaryCtxReset(0))
    done(cuda.cuMemFree(address))


def test_no_bytes_are_no_copy(cuda: Any) -> None:
    done(cuda.cuMemcpyAsync(0, 0, 0, 0))
