"""Handles of memory, between virtual processes and real ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_driver.asked import bytes_of, done, filled, in_a_process, name_of, numbers, told

BLOCK = 2 * 2**20


def exported(cuda: Any, byte_size: int = BLOCK) -> tuple[int, Any]:
    address = int(done(cuda.cuMemAlloc(byte_size)))
    return address, done(cuda.cuIpcGetMemHandle(address))


def test_another_process_sees_the_same_memory(cuda: Any, driver: FakeDriver) -> None:
    address, handle = exported(cuda)
    numbers(driver, address)[:] = [1, 2, 3, 4]
    program = """
    address = done(cuda.cuIpcOpenMemHandle(filled(cuda, "CUipcMemHandle", bytes.fromhex(sys.argv[1])), 1))
    seen = driver.memory(int(address), (4,), np.int32)
    print(seen.tolist())
    seen += 1
    done(cuda.cuIpcCloseMemHandle(address))
    """
    assert told(program, bytes_of(handle).hex()) == "[1, 2, 3, 4]"
    assert numbers(driver, address).tolist() == [2, 3, 4, 5]
    done(cuda.cuMemFree(address))


def test_what_is_opened_twice_has_one_address_and_is_closed_twice(cuda: Any, other: Any, driver: FakeDriver) -> None:
    address, handle = exported(cuda)
    first, second = (int(done(other.cuIpcOpenMemHandle(handle, 1))) for _ in range(2))
    assert first == second
    assert driver.live(1).opened == 2
    done(other.cuIpcCloseMemHandle(first))
    done(other.cuIpcCloseMemHandle(first))
    assert name_of(other.cuIpcCloseMemHandle(first)) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


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


def test_ones_own_handle_is_refused(cuda: Any) -> None:
    address, handle = exported(cuda)
    assert name_of(cuda.cuIpcOpenMemHandle(handle, 1)) == "INVALID_CONTEXT"
    done(cuda.cuMemFree(address))


def test_the_flag_is_required(cuda: Any, other: Any) -> None:
    address, handle = exported(cuda)
    assert name_of(other.cuIpcOpenMemHandle(handle, 0)) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


def test_garbage_and_events_are_no_handles_of_memory(cuda: Any, other: Any) -> None:
    assert name_of(other.cuIpcOpenMemHandle(filled(other, "CUipcMemHandle", os.urandom(64)), 1)) == "INVALID_VALUE"
    event = done(cuda.cuEventCreate(6))
    handle = bytes_of(done(cuda.cuIpcGetEventHandle(event)))
    assert name_of(other.cuIpcOpenMemHandle(filled(other, "CUipcMemHandle", handle), 1)) == "INVALID_VALUE"
    done(cuda.cuEventDestroy(event))


@pytest.mark.parametrize(("pid", "error"), [(1, "INVALID_CONTEXT"), (2, "INVALID_VALUE")])
def test_other_pid_namespaces(cuda: Any, other: Any, driver: FakeDriver, pid: int, error: str) -> None:
    driver.namespace(0, "one container", 1)
    driver.namespace(1, "another container", pid)
    address, handle = exported(cuda)
    try:
        assert name_of(other.cuIpcOpenMemHandle(handle, 1)) == error
    finally:
        driver.namespace(0, "")
        driver.namespace(1, "")
    done(cuda.cuMemFree(address))


def test_a_gpu_that_is_not_here(cuda: Any) -> None:
    address, handle = exported(cuda)
    program = """
    print(name_of(cuda.cuIpcOpenMemHandle(filled(cuda, "CUipcMemHandle", bytes.fromhex(sys.argv[1])), 1)))
    """
    assert told(program, bytes_of(handle).hex(), SHM_FAKE_CUDA_UUIDS="11" * 16) == "INVALID_VALUE"
    done(cuda.cuMemFree(address))


def test_freed_memory_cannot_be_opened(cuda: Any, other: Any, driver: FakeDriver) -> None:
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


def test_a_handle_of_a_dead_process(cuda: Any, driver: FakeDriver) -> None:
    program = """
    address = done(cuda.cuMemAlloc(1 << 20))
    driver.memory(int(address), (4,), np.int32)[:] = 5
    handle = done(cuda.cuIpcGetMemHandle(address))
    print(ctypes.string_at(handle.getPtr(), 64).hex(), flush=True)
    sys.stdin.read()
    """
    with in_a_process(program) as owner:
        assert owner.stdout
        handle = filled(cuda, "CUipcMemHandle", bytes.fromhex(owner.stdout.readline()))
        opened = int(done(cuda.cuIpcOpenMemHandle(handle, 1)))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert name_of(cuda.cuIpcOpenMemHandle(handle, 1)) == "MAP_FAILED"
    assert numbers(driver, opened).tolist() == [5] * 4  # until it is closed
    done(cuda.cuIpcCloseMemHandle(opened))


def test_an_opener_that_was_killed_has_nothing_open(cuda: Any, driver: FakeDriver) -> None:
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


def test_allocations_leave_nothing(cuda: Any) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(200):
        address, _ = exported(cuda, 600)
        done(cuda.cuMemFree(address))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_addresses_of_another_process_are_of_no_use(cuda: Any, other: Any) -> None:
    address, _ = exported(cuda)
    words = np.zeros(4, np.int32)
    assert name_of(other.cuMemcpyDtoH(words.ctypes.data, address, 16)) == "ILLEGAL_ADDRESS"
    done(other.cuDevicePrimaryCtxReset(0))
    done(cuda.cuMemFree(address))
