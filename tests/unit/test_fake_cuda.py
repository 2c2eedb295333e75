"""FakeCuda keeps CUDA's rules: of memory, of handles, of devices."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime, device_guard
from shm_backend_utils.memory.managed import KEY
from shm_backend_utils.testing.fake_cuda.memory import KEY_PREFIX
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, LiveCounts, kernel
from tests.unit.fake_gpu import (
    BYTES,
    INTEGERS,
    INVALID_HANDLE,
    INVALID_VALUE,
    SIZE,
    bytes_at,
    fails_by,
    in_another_thread,
    objects_of,
    run_python,
    runtime_that_gives_all_back,
)

PEBIBYTE = 2**50


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
    assert objects_of(os.getpid()) == []


@pytest.fixture
def peer(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """What another process has."""
    with runtime_that_gives_all_back() as peer:
        yield peer


@pytest.fixture
def memory(cuda: FakeCuda) -> Iterator[int]:
    address = cuda.allocate(SIZE)
    yield address
    cuda.free(address)


def add_one(memory: npt.NDArray[Any]) -> None:
    memory += 1


# Memory


def test_an_address_is_where_the_bytes_are(cuda: FakeCuda, memory: int) -> None:
    ctypes.memset(memory + 10, 7, 1)
    assert bytes_at(cuda, memory + 10, 1).get() == [7]


def test_new_memory_is_not_zero(cuda: FakeCuda, memory: int) -> None:
    assert bytes_at(cuda, memory).get().all()


@pytest.mark.parametrize(
    ("byte_size", "name"), [(0, INVALID_VALUE), (-1, INVALID_VALUE), (PEBIBYTE, "cudaErrorMemoryAllocation")]
)
def test_memory_that_cannot_be_had_is_not_allocated(cuda: FakeCuda, byte_size: int, name: str) -> None:
    with fails_by(name):
        cuda.allocate(byte_size)


def test_what_is_freed_is_gone(cuda: FakeCuda) -> None:
    address = cuda.allocate(SIZE)
    array = bytes_at(cuda, address)
    assert len(objects_of(os.getpid())) == 1
    cuda.free(address)
    assert objects_of(os.getpid()) == []
    with fails_by("cudaErrorIllegalAddress"):
        array.get()


def test_only_what_was_allocated_can_be_freed_and_once(cuda: FakeCuda, memory: int) -> None:
    with fails_by(INVALID_VALUE):
        cuda.free(memory + 1)
    address = cuda.allocate(SIZE)
    cuda.free(address)
    with fails_by(INVALID_VALUE):
        cuda.free(address)


def test_freeing_waits_for_what_is_on_streams(cuda: FakeCuda) -> None:
    address, done = cuda.allocate(SIZE), cuda.empty((1,), BYTES)
    kernel(lambda memory, done: done.fill(memory.size % 256), bytes_at(cuda, address), done)
    cuda.free(address)
    assert done.peek() == [SIZE % 256]


def test_the_extent_is_that_of_the_allocation_an_address_is_in(cuda: FakeCuda, memory: int) -> None:
    assert cuda.extent(memory) == cuda.extent(memory + SIZE - 1) == (memory, SIZE)


def test_freed_memory_has_no_extent(cuda: FakeCuda) -> None:
    address = cuda.allocate(SIZE)
    cuda.free(address)
    with fails_by(INVALID_VALUE):
        cuda.extent(address)


def test_its_memory_is_never_taken_for_a_managed_region(memory: int) -> None:
    (key,) = objects_of(os.getpid())
    assert KEY.fullmatch(key) is None
    assert key not in {report.key for report in (*reaper.scan(), *reaper.reap())}
    assert objects_of(os.getpid()) == [key]


def test_a_runtime_that_is_forgotten_leaves_nothing() -> None:
    FakeCuda().allocate(SIZE)
    gc.collect()
    assert objects_of(os.getpid()) == []


def test_a_process_that_ends_leaves_nothing() -> None:
    ended = run_python("cuda = FakeCuda(); cuda.allocate(1000); print(os.getpid())")
    assert ended.returncode == 0, ended.stderr
    assert objects_of(int(ended.stdout)) == []


def test_what_a_killed_process_left_is_removed_by_the_next_runtime() -> None:
    killed = run_python(
        "cuda = FakeCuda(); cuda.allocate(1000); print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    FakeCuda()
    assert objects_of(int(killed.stdout)) == []


def test_a_forked_child_can_use_nothing_and_removes_nothing() -> None:
    ended = run_python(
        "cuda = FakeCuda(); address = cuda.allocate(1000)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: cuda.extent(address)\n"
        "    except Exception as error: sys.exit(error.name)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cuda.extent(address)[1])\n"
        f"print(any(name.startswith('{KEY_PREFIX}' + str(os.getpid())) for name in os.listdir('/dev/shm')))"
    )
    assert ended.stdout.split() == ["1", "1000", "True"]
    assert ended.stderr.strip() == "cudaErrorInitializationError"


# Handles


def test_a_handle_has_cudas_length_and_is_one_allocations(cuda: FakeCuda, memory: int) -> None:
    other = cuda.allocate(SIZE)
    assert len(cuda.export(memory)) == HANDLE_LENGTH
    assert cuda.export(memory) == cuda.export(memory) != cuda.export(other)
    cuda.free(other)


def test_only_an_allocation_has_a_handle(cuda: FakeCuda, memory: int) -> None:
    with fails_by(INVALID_VALUE):
        cuda.export(memory + 1)


def test_both_sides_of_a_handle_see_what_the_other_writes(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    there = peer.open(cuda.export(memory))
    assert there != memory
    bytes_at(cuda, memory).peek()[0] = 1
    bytes_at(peer, there).peek()[1] = 2
    assert bytes_at(peer, there).get()[0] == 1
    assert bytes_at(cuda, memory).get()[1] == 2
    peer.close(there)


def test_who_exported_memory_cannot_open_it(cuda: FakeCuda, memory: int) -> None:
    with fails_by("cudaErrorDeviceUninitialized"):
        cuda.open(cuda.export(memory))


def test_freed_memory_cannot_be_opened(cuda: FakeCuda, peer: FakeCuda) -> None:
    address = cuda.allocate(SIZE)
    handle = cuda.export(address)
    cuda.free(address)
    with fails_by(INVALID_HANDLE):
        peer.open(handle)


def test_memory_of_a_dead_process_cannot_be_opened(peer: FakeCuda) -> None:
    killed = run_python(
        "cuda = FakeCuda(); print(cuda.export(cuda.allocate(1000)).hex(), os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    handle, pid = killed.stdout.split()
    assert len(objects_of(int(pid))) == 1
    with fails_by(INVALID_HANDLE):
        peer.open(bytes.fromhex(handle))
    assert objects_of(int(pid)) == []


@pytest.mark.parametrize("handle", [b"", bytes(HANDLE_LENGTH), b"FAKE", b"\1" * HANDLE_LENGTH])
def test_what_is_no_handle_cannot_be_opened(cuda: FakeCuda, handle: bytes) -> None:
    with fails_by(INVALID_VALUE):
        cuda.open(handle)


def test_memory_is_opened_on_its_own_device_only(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    peer.set_device(1)
    with fails_by("cudaErrorMapBufferObjectFailed"):
        peer.open(cuda.export(memory))


def test_the_uuid_says_which_device_it_is_not_the_number(cuda: FakeCuda, memory: int) -> None:
    peer = FakeCuda(uuids=[cuda.device_uuid(1), cuda.device_uuid(0)])
    peer.set_device(1)
    peer.close(peer.open(cuda.export(memory)))
    assert peer.live == LiveCounts()


def test_what_is_opened_twice_has_one_address_and_is_closed_twice(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    handle = cuda.export(memory)
    address = peer.open(handle)
    array = bytes_at(peer, address)
    assert (peer.open(handle), peer.live.opened) == (address, 2)
    peer.close(address)
    assert array.get().size == SIZE
    peer.close(address)
    with fails_by("cudaErrorIllegalAddress"):
        array.get()
    with fails_by(INVALID_VALUE):
        peer.close(address)


def test_what_was_opened_is_not_freed_and_what_was_allocated_is_not_closed(
    cuda: FakeCuda, peer: FakeCuda, memory: int
) -> None:
    there = peer.open(cuda.export(memory))
    with fails_by(INVALID_VALUE):
        peer.free(there)
    with fails_by(INVALID_VALUE):
        cuda.close(memory)
    peer.close(there)


def test_opened_memory_has_the_extent_that_was_allocated(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    there = peer.open(cuda.export(memory))
    assert peer.extent(there + 5) == (there, SIZE)
    peer.close(there)


def test_opened_memory_outlives_its_freeing_as_long_as_it_is_open(cuda: FakeCuda, peer: FakeCuda) -> None:
    address = cuda.allocate(SIZE)
    there = peer.open(cuda.export(address))
    cuda.free(address)
    assert bytes_at(peer, there).get().size == SIZE
    peer.close(there)


def test_closing_memory_waits_for_work_that_is_still_on_a_stream(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    there = peer.open(cuda.export(memory))
    before = bytes_at(cuda, memory).peek().copy()
    kernel(add_one, bytes_at(peer, there))
    peer.close(there)
    assert (bytes_at(cuda, memory).peek() == before + 1).all()


# Devices


def test_a_device_has_the_same_uuid_for_everybody_and_no_other_has_it(cuda: FakeCuda, peer: FakeCuda) -> None:
    uuids = [cuda.device_uuid(device) for device in range(cuda.device_count())]
    assert uuids == [peer.device_uuid(device) for device in range(2)]
    assert len(set(uuids)) == 2
    assert all(len(bytes.fromhex(uuid)) == 16 and uuid == uuid.lower() for uuid in uuids)


def test_every_device_needs_a_uuid() -> None:
    with pytest.raises(ValueError, match="1 UUIDs were given for 2 devices; expected one for each"):
        FakeCuda(2, ["0" * 32])


def test_each_thread_has_a_current_device_of_its_own(cuda: FakeCuda) -> None:
    cuda.set_device(1)
    assert (cuda.current_device(), in_another_thread(cuda.current_device)) == (1, 0)


@pytest.mark.parametrize("device", [-1, 2])
def test_there_is_no_other_device(cuda: FakeCuda, device: int) -> None:
    with fails_by("cudaErrorInvalidDevice"):
        cuda.set_device(device)
    with fails_by("cudaErrorInvalidDevice"):
        cuda.device_uuid(device)


def test_a_machine_may_have_no_gpu() -> None:
    cuda = FakeCuda(0)
    assert cuda.device_count() == 0
    with fails_by("cudaErrorNoDevice"):
        cuda.current_device()
    with fails_by("cudaErrorNoDevice"):
        cuda.allocate(SIZE)


def test_memory_is_allocated_on_the_current_device_and_freed_from_any(cuda: FakeCuda) -> None:
    with device_guard(cuda, 1):
        address = cuda.allocate(SIZE)
        own = cuda.empty((3,), INTEGERS)
    assert (bytes_at(cuda, address, device=1).device, own.device) == (1, 1)
    with fails_by("cudaErrorInvalidDevice"):
        bytes_at(cuda, address, device=0)
    cuda.free(address)


# What tests ask for


def test_a_failure_can_be_asked_for_and_happens_once(cuda: FakeCuda, memory: int) -> None:
    cuda.fail_next("extent", "cudaErrorNotSupported")
    cuda.fail_next("extent", "cudaErrorNoDevice")
    for name in ("cudaErrorNotSupported", "cudaErrorNoDevice"):
        with fails_by(name):
            cuda.extent(memory)
    assert cuda.extent(memory) == (memory, SIZE)


def test_only_what_exists_can_be_made_to_fail(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="CudaRuntime has no method 'opne'"):
        cuda.fail_next("opne", "cudaErrorNotSupported")


@pytest.mark.parametrize("method", sorted(CudaRuntime.__abstractmethods__))
def test_every_method_of_the_interface_can_be_made_to_fail(cuda: FakeCuda, method: str) -> None:
    function = getattr(cuda, method)
    anything = [None] * len(inspect.signature(function).parameters)
    cuda.fail_next(method, "cudaErrorUnknown")
    with fails_by("cudaErrorUnknown"):
        function(*anything)


def test_the_log_tells_what_was_done_in_order(cuda: FakeCuda) -> None:
    stream = cuda.current_stream()
    array = cuda.empty((2,), BYTES)
    cuda.copy(array, np.zeros(2, BYTES), stream.ptr)
    kernel(add_one, array)
    cuda.synchronize(stream.ptr)
    assert cuda.log == [
        ("empty", 2),
        ("copy", ("host to device", 2, stream.ptr)),
        ("launch", stream.ptr),
        ("synchronize", stream.ptr),
    ]


def test_what_is_live_is_counted(cuda: FakeCuda, peer: FakeCuda, memory: int) -> None:
    array = cuda.empty((1,), BYTES)
    cuda.pin(4096, 1)
    there = peer.open(cuda.export(memory))
    assert (cuda.live, peer.live) == (LiveCounts(allocations=2, pinned=1), LiveCounts(opened=1))
    peer.close(there)
    cuda.unpin(4096)
    del array
    assert cuda.live == LiveCounts(allocations=1)
