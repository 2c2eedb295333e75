"""Memory, addresses and pinned ranges."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import done, name_of, numbers, told

BLOCK = 2 * 2**20


def test_new_memory_is_full_of_rubbish(cuda: Any, driver: FakeDriver) -> None:
    address = done(cuda.cuMemAlloc(64))
    assert numbers(driver, address).all()
    done(cuda.cuMemFree(address))


def test_small_allocations_share_a_block_and_large_ones_do_not(cuda: Any) -> None:
    small = [int(done(cuda.cuMemAlloc(100))) for _ in range(3)]
    large = [int(done(cuda.cuMemAlloc(BLOCK))) for _ in range(2)]
    assert len({address // BLOCK for address in small}) == 1
    assert all(address % BLOCK == 0 for address in large)
    assert [int(number) for number in done(cuda.cuMemGetAddressRange(small[1] + 7))] == [small[1], 512]
    for address in [*small, *large]:
        done(cuda.cuMemFree(address))
    assert name_of(cuda.cuMemFree(small[0])) == "INVALID_VALUE"
    assert name_of(cuda.cuMemGetAddressRange(small[0])) == "NOT_FOUND"


def test_only_the_beginning_of_an_allocation_is_freed(cuda: Any) -> None:
    address = done(cuda.cuMemAlloc(100))
    assert name_of(cuda.cuMemFree(int(address) + 8)) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


def test_memory_runs_out(cuda: Any) -> None:
    assert name_of(cuda.cuMemAlloc(2**50)) == "OUT_OF_MEMORY"
    free, total = done(cuda.cuMemGetInfo())
    assert free == total


def test_host_code_that_touches_a_device_address_crashes() -> None:
    program = """
    address = int(done(cuda.cuMemAlloc(64)))
    pid = os.fork()
    if not pid:
        ctypes.string_at(address, 4)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert told(program) == "-11"


def test_managed_memory_is_reached_by_the_host(cuda: Any, driver: FakeDriver) -> None:
    address = int(done(cuda.cuMemAllocManaged(16, 1)))
    ctypes.memset(address, 1, 16)
    assert numbers(driver, address).tolist() == [0x01010101] * 4
    assert attribute(cuda, "IS_MANAGED", address)
    done(cuda.cuMemFree(address))


def attribute(cuda: Any, name: str, address: int) -> Any:
    return done(cuda.cuPointerGetAttribute(getattr(cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address))


@pytest.mark.parametrize("kind", ["device", "pool", "managed", "vmm"])
def test_only_what_cumemalloc_made_can_be_exported(cuda: Any, driver: FakeDriver, kind: Any) -> None:
    tensor = driver.tensor(np.arange(4), kind=kind)
    is_exportable = bool(attribute(cuda, "IS_LEGACY_CUDA_IPC_CAPABLE", tensor.address))
    assert is_exportable == (kind == "device")
    assert name_of(cuda.cuIpcGetMemHandle(tensor.address)) == ("CUDA_SUCCESS" if is_exportable else "INVALID_VALUE")
    assert tensor.get().tolist() == [0, 1, 2, 3]


def test_what_is_said_of_addresses(cuda: Any) -> None:
    first, second = (int(done(cuda.cuMemAlloc(100))) for _ in range(2))
    assert attribute(cuda, "DEVICE_ORDINAL", first + 1) == 0
    assert int(attribute(cuda, "RANGE_START_ADDR", first + 99)) == first
    assert attribute(cuda, "BUFFER_ID", first) != attribute(cuda, "BUFFER_ID", second)
    done(cuda.cuMemFree(first))
    done(cuda.cuMemFree(second))
    name = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert name_of(cuda.cuPointerGetAttribute(name, np.ones(1).ctypes.data)) == "INVALID_VALUE"


def test_host_memory_is_pinned_once(cuda: Any) -> None:
    memory = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    done(cuda.cuMemHostRegister(address, 8192, 1))
    assert name_of(cuda.cuMemHostRegister(address + 4096, 8192, 1)) == "HOST_MEMORY_ALREADY_REGISTERED"
    assert int(attribute(cuda, "MEMORY_TYPE", address + 1)) == 1
    assert int(done(cuda.cuMemHostGetDevicePointer(address, 0))) == address
    assert name_of(cuda.cuMemHostUnregister(address + 1)) == "HOST_MEMORY_NOT_REGISTERED"
    done(cuda.cuMemHostUnregister(address))
    assert name_of(cuda.cuMemHostUnregister(address)) == "HOST_MEMORY_NOT_REGISTERED"


def test_pinned_memory_of_the_driver(cuda: Any) -> None:
    address = done(cuda.cuMemHostAlloc(100, 1))
    ctypes.memset(int(address), 0, 100)
    assert name_of(cuda.cuMemHostUnregister(address)) == "HOST_MEMORY_NOT_REGISTERED"
    done(cuda.cuMemFreeHost(address))


def test_virtual_memory_needs_access(cuda: Any, driver: FakeDriver) -> None:
    plan = cuda.CUmemAllocationProp()
    plan.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    plan.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    plan.location.id = 0
    address = int(done(cuda.cuMemAddressReserve(2 * BLOCK, 0, 0, 0)))
    handles = [done(cuda.cuMemCreate(BLOCK, plan, 0)) for _ in range(2)]
    for number, handle in enumerate(handles):
        done(cuda.cuMemMap(address + number * BLOCK, BLOCK, 0, handle, 0))
        done(cuda.cuMemRelease(handle))
    access = cuda.CUmemAccessDesc()
    access.location.type, access.location.id = plan.location.type, 0
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    done(cuda.cuMemSetAccess(address, BLOCK, [access], 1))
    words = np.arange(8, dtype=np.int32)
    over_the_edge = address + BLOCK - 16
    assert name_of(cuda.cuMemcpyHtoD(over_the_edge, words.ctypes.data, 32)) == "ILLEGAL_ADDRESS"
    done(cuda.cuDevicePrimaryCtxReset(0))
    done(cuda.cuMemSetAccess(address, 2 * BLOCK, [access], 1))
    done(cuda.cuMemcpyHtoD(over_the_edge, words.ctypes.data, 32))  # two mappings, one tensor
    assert numbers(driver, over_the_edge, 8).tolist() == list(range(8))
    done(cuda.cuMemUnmap(address, 2 * BLOCK))
    done(cuda.cuMemAddressFree(address, 2 * BLOCK))
