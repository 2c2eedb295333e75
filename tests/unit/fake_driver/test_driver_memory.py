"""Memory of the fake: allocated, shared between processes, copied, and as tensors."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from shm_backend_utils.testing.fake_cuda.tensor import Kind
from tests.unit.fake_driver.asked import bytes_of, done, in_a_process, name_of, numbers, told

BLOCK = 2 * 2**20


def test_new_memory_is_full_of_rubbish(cuda: Any, driver: FakeDriver) -> None:
    address = done(cuda.cuMemAlloc(64))
    assert numbers(driver, address).all()
    done(cuda.cuMemFree(address))


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
    is_managed = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    assert done(cuda.cuPointerGetAttribute(is_managed, address))
    done(cuda.cuMemFree(address))


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


# Between processes


def exported(cuda: Any, byte_size: int = BLOCK) -> tuple[int, Any]:
    address = int(done(cuda.cuMemAlloc(byte_size)))
    return address, done(cuda.cuIpcGetMemHandle(address))


def test_the_whole_block_is_opened(cuda: Any, other: Any, driver: FakeDriver) -> None:
    first = int(done(cuda.cuMemAlloc(512)))
    second, handle = exported(cuda, 512)
    numbers(driver, second)[:] = 7
    opened = int(done(other.cuIpcOpenMemHandle(handle, 1)))
    base, size = (int(number) for number in done(other.cuMemGetAddressRange(opened)))
    assert size == BLOCK
    assert opened - base == second % BLOCK
    assert numbers(driver, opened).tolist() == [7] * 4
    done(cuda.cuMemFree(first))  # a neighbour, that nobody has opened
    done(other.cuIpcCloseMemHandle(opened))
    done(cuda.cuMemFree(second))


def test_a_gpu_that_is_not_here(cuda: Any) -> None:
    address, handle = exported(cuda)
    program = """
    print(name_of(cuda.cuIpcOpenMemHandle(filled(cuda, "CUipcMemHandle", bytes.fromhex(sys.argv[1])), 1)))
    """
    assert told(program, bytes_of(handle).hex(), SHM_FAKE_CUDA_UUIDS="11" * 16) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


def test_freed_memory_cannot_be_opened(cuda: Any, other: Any) -> None:
    address, handle = exported(cuda)
    done(cuda.cuMemFree(address))
    assert name_of(other.cuIpcOpenMemHandle(handle, 1)) == "INVALID_HANDLE"
    again, newer = exported(cuda)
    assert bytes_of(newer) != bytes_of(handle)
    assert name_of(other.cuIpcOpenMemHandle(handle, 1)) == "INVALID_HANDLE"
    done(cuda.cuMemFree(again))


def test_freeing_what_others_have_open_is_told(cuda: Any, other: Any, driver: FakeDriver) -> None:
    address, handle = exported(cuda)
    opened = done(other.cuIpcOpenMemHandle(handle, 1))
    done(cuda.cuMemFree(address))
    assert driver.violations() == ["memory was freed that others have open (1)"]
    words = np.zeros(4, np.int32)
    assert name_of(other.cuMemcpyDtoH(words.ctypes.data, opened, 16)) == "ILLEGAL_ADDRESS"
    done(other.cuDevicePrimaryCtxReset(0))
    done(other.cuIpcCloseMemHandle(opened))
    assert driver.violations()[1:] == [
        "memory was used that its owner has freed",
        "memory was closed after its owner had freed it",
    ]
    driver.forget()


def test_an_opener_that_was_killed_has_nothing_open(cuda: Any) -> None:
    address, handle = exported(cuda)
    program = """
    done(cuda.cuIpcOpenMemHandle(filled(cuda, "CUipcMemHandle", bytes.fromhex(sys.argv[1])), 1))
    print("open", flush=True)
    sys.stdin.read()
    """
    with in_a_process(program, bytes_of(handle).hex()) as opener:
        assert opener.stdout
        assert opener.stdout.readline() == "open\n"
        opener.kill()
        opener.wait()
    done(cuda.cuMemFree(address))


def test_ten_thousand_openings_leave_nothing(cuda: Any, other: Any) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())

    address, handle = exported(cuda)
    done(other.cuIpcCloseMemHandle(done(other.cuIpcOpenMemHandle(handle, 1))))
    before = held()
    for _ in range(10_000):
        other.cuIpcCloseMemHandle(other.cuIpcOpenMemHandle(handle, 1)[1])
    assert held()[0] == before[0]
    assert held()[1] <= before[1] + 4  # Python's own
    done(cuda.cuMemFree(address))


# Copies


WORDS = np.arange(4, dtype=np.int32)


def filled_memory(cuda: Any, byte_size: int = 64) -> int:
    address = int(done(cuda.cuMemAlloc(byte_size)))
    done(cuda.cuMemcpyHtoD(address, WORDS.ctypes.data, 16))
    return address


def test_a_copy_beyond_its_allocation_spoils_the_context(cuda: Any) -> None:
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


def test_events_after_an_error_do_not_hang(cuda: Any) -> None:
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


# Tensors


pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def fields(capsule: object, name: bytes = b"dltensor") -> tuple[int, int, int, int, int]:
    """Return address, device type, device, type code and bits of what a capsule holds."""
    at = pointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    kind, device = (ctypes.c_int32.from_address(at + offset).value for offset in (8, 12))
    code, bits = (ctypes.c_uint8.from_address(at + offset).value for offset in (20, 21))
    return ctypes.c_uint64.from_address(at).value, kind, device, code, bits


@pytest.mark.parametrize(("kind", "device_type"), [("device", 2), ("pool", 2), ("managed", 13), ("vmm", 2)])
def test_a_capsule(driver: FakeDriver, cuda: Any, kind: Kind, device_type: int) -> None:
    tensor = driver.tensor(np.arange(4, dtype=np.float32), device=1, kind=kind)
    assert fields(tensor.__dlpack__()) == (tensor.address, device_type, 1, 2, 32)
    assert tensor.__dlpack_device__() == (device_type, 1)
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        capsule = tensor.__dlpack__(max_version=(1, 1))
        assert fields(capsule, b"dltensor_versioned")[0] == tensor.address
        del capsule
    del tensor
    gc.collect()
    with cuda.context(1):
        done(cuda.cuCtxSynchronize())
    assert driver.live().allocations == 0


def test_a_tensor_that_is_written_late(driver: FakeDriver, cuda: Any) -> None:
    driver.delay(0.5)
    writes, reads = (int(done(cuda.cuStreamCreate(1))) for _ in range(2))
    tensor = driver.tensor(np.arange(3), stream=writes)
    assert tensor.peek().tolist() != [0, 1, 2]
    assert tensor.__cuda_array_interface__["stream"] == writes
    tensor.__dlpack__(stream=-1)
    driver.delay(0)
    done(cuda.cuStreamSynchronize(reads))
    assert tensor.peek().tolist() != [0, 1, 2]
    tensor.__dlpack__(stream=reads)
    done(cuda.cuStreamSynchronize(reads))
    assert tensor.peek().tolist() == [0, 1, 2]
    driver.delay(0.02)
    tensor.write([7, 8, 9], writes)
    assert tensor.get().tolist() == [7, 8, 9]
    for stream in (writes, reads):
        done(cuda.cuStreamDestroy(stream))
