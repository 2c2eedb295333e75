"""Device memory that one process allocates and others map, on the fake GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, MachineError, RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation, CudaMapping, CudaMappings, device_of
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaRuntime, device_guard
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, LiveCounts
from tests.unit.fake_gpu import (
    BYTES,
    SIZE,
    fails_by,
    in_another_thread,
    objects_of,
    runtime_that_gives_all_back,
)

DEVICE = 1
FIELD = "regions[1]"
FLOATS = np.dtype(np.float32)
NOTHING = LiveCounts()


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """What the owner of the memory has."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
    assert objects_of(os.getpid()) == []


@pytest.fixture
def peer(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """What the process that maps it has."""
    with runtime_that_gives_all_back() as peer:
        yield peer
        assert peer.current_device() == 0


@pytest.fixture
def mappings(peer: FakeCuda) -> CudaMappings:
    return CudaMappings(peer)


@pytest.fixture
def allocation(cuda: FakeCuda) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    yield allocation
    allocation.free()


def mapping_of(allocation: CudaAllocation, mappings: CudaMappings) -> CudaMapping:
    return mappings.map(allocation.handle, allocation.byte_size, DEVICE, FIELD)


def whole(memory: CudaAllocation | CudaMapping) -> FakeDeviceArray:
    array = memory.array_at(0, BYTES, (memory.byte_size,), memory.byte_size, None)
    assert isinstance(array, FakeDeviceArray)
    return array


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


def reason_against(mappings: CudaMappings, handle: bytes, byte_size: int = SIZE, device: int = DEVICE) -> str:
    """Return why mapping is refused."""
    with pytest.raises(RegionRefusedError) as caught:
        mappings.map(handle, byte_size, device, FIELD)
    assert caught.value.field == FIELD
    assert str(caught.value).startswith(f"{FIELD} refused: ")
    assert handle.hex() not in str(caught.value) or not handle
    reason = caught.value.reason
    del caught  # it has the frames, and what they hold
    gc.collect()
    return reason


# Allocating


def test_an_allocation_knows_how_others_find_it(cuda: FakeCuda, allocation: CudaAllocation) -> None:
    assert (allocation.byte_size, allocation.device) == (SIZE, DEVICE)
    assert allocation.handle == cuda.export(allocation.address)
    assert allocation.device_uuid == cuda.device_uuid(DEVICE)


def test_arrays_lie_where_they_are_asked_for(allocation: CudaAllocation) -> None:
    array = allocation.array_at(100, FLOATS, (2, 3), 24, None)
    assert isinstance(array, FakeDeviceArray)
    assert (array.address - allocation.address, array.shape, array.dtype, array.device) == (100, (2, 3), FLOATS, DEVICE)
    assert array.is_contiguous


def test_an_array_that_needs_more_than_its_bytes_is_not_made(allocation: CudaAllocation) -> None:
    assert allocation.array_at(0, FLOATS, (2, 3), 23, None) is None
    assert allocation.array_at(0, FLOATS, (2**40, 2**40), SIZE, None) is None


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("allocate", "cudaErrorMemoryAllocation"),
        ("export", "cudaErrorNotSupported"),
        ("device_uuid", "cudaErrorInvalidDevice"),
    ],
)
def test_an_allocation_that_fails_leaves_nothing(cuda: FakeCuda, method: str, name: str) -> None:
    cuda.fail_next(method, name)
    with fails_by(name):
        CudaAllocation(cuda, SIZE, DEVICE)
    gc.collect()  # the error has had the frames, and what they hold
    assert cuda.live == NOTHING


def test_an_allocation_is_freed_once(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    allocation.free()
    assert (cuda.live, times(cuda, "free")) == (NOTHING, 1)


def test_memory_is_freed_after_the_last_array(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    view = whole(allocation)[10:20]
    allocation.free()
    assert view.get().size == 10
    assert cuda.live.allocations == 1
    del view
    assert cuda.live == NOTHING


def test_memory_is_freed_when_its_allocation_is_forgotten(cuda: FakeCuda) -> None:
    CudaAllocation(cuda, SIZE, DEVICE)
    assert (cuda.live, times(cuda, "free")) == (NOTHING, 1)


def test_memory_is_freed_by_whichever_thread_drops_it_last_and_on_its_own_device(cuda: FakeCuda) -> None:
    held = [CudaAllocation(cuda, SIZE, DEVICE)]
    del cuda.log[:]
    in_another_thread(held.clear)
    assert [name for name, _ in cuda.log] == ["set_device", "free", "set_device"]
    assert [detail for name, detail in cuda.log if name == "set_device"] == [DEVICE, 0]


def test_memory_that_cannot_be_freed_disturbs_nobody(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    cuda.fail_next("free", "cudaErrorIllegalAddress")
    allocation.free()
    cuda.free(allocation.address)  # it is still there to be freed


def test_freed_memory_makes_no_arrays(cuda: FakeCuda) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    with pytest.raises(ClosedError, match="this device memory is closed"):
        allocation.array_at(0, BYTES, (1,), 1)


def test_memory_on_a_gpu_that_there_is_not_is_not_allocated(cuda: FakeCuda) -> None:
    with fails_by("cudaErrorInvalidDevice"):
        CudaAllocation(cuda, SIZE, 2)


# Mapping


def test_both_sides_see_what_the_other_writes(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    here, there = whole(allocation), whole(mapping_of(allocation, mappings))
    here.peek()[0] = 1
    there.peek()[SIZE - 1] = 2
    assert there.get()[0] == 1
    assert here.get()[SIZE - 1] == 2


def test_a_mapping_knows_what_it_is(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mapping_of(allocation, mappings)
    assert (mapping.handle, mapping.byte_size, mapping.device) == (allocation.handle, SIZE, DEVICE)
    assert not mapping.is_closed
    assert not mapping.is_unlinked


def test_arrays_of_a_mapping_lie_where_they_are_asked_for(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mapping_of(allocation, mappings)
    array = mapping.array_at(100, FLOATS, (2, 3), 24)
    assert isinstance(array, FakeDeviceArray)
    assert (array.address - mapping.address, array.shape, array.dtype, array.device) == (100, (2, 3), FLOATS, DEVICE)
    assert mapping.array_at(100, FLOATS, (2, 3), 23) is None


def test_two_mappings_have_one_identity_if_they_are_of_one_allocation(
    cuda: FakeCuda, allocation: CudaAllocation, mappings: CudaMappings
) -> None:
    other = CudaAllocation(cuda, SIZE, DEVICE)
    one, same = mapping_of(allocation, mappings), mapping_of(allocation, mappings)
    assert one.identity == same.identity != mapping_of(other, mappings).identity
    assert one.identity[0] < 0  # no file is on such a device
    other.free()


@pytest.mark.parametrize("byte_size", [0, 1, SIZE])
def test_what_is_mapped_passes_its_check(allocation: CudaAllocation, mappings: CudaMappings, byte_size: int) -> None:
    mapping_of(allocation, mappings).check(byte_size, FIELD)


def test_more_than_is_mapped_fails_the_check(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    with pytest.raises(RegionRefusedError, match=rf"regions\[1\] refused: it claims {SIZE + 1} bytes of .* {SIZE}$"):
        mapping_of(allocation, mappings).check(SIZE + 1, FIELD)


def test_memory_is_opened_once_however_often_it_is_mapped(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    one, other = mapping_of(allocation, mappings), mapping_of(allocation, mappings)
    assert one.address == other.address
    assert times(peer, "open") == 1
    one.close()
    assert (whole(other).get().size, peer.live.opened) == (SIZE, 1)
    other.close()
    assert (peer.live, times(peer, "close")) == (NOTHING, 1)


def test_memory_that_was_closed_is_opened_again(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    for _ in range(2):
        mapping_of(allocation, mappings).close()
        assert peer.live == NOTHING
    assert times(peer, "open") == times(peer, "close") == 2


def test_memory_is_closed_when_a_mapping_is_forgotten(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    mapping = mapping_of(allocation, mappings)
    assert peer.live.opened == 1
    del mapping
    assert peer.live == NOTHING


def test_memory_is_closed_after_the_last_array(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    mapping = mapping_of(allocation, mappings)
    array = whole(mapping)
    view = array[10:20]
    mapping.close()
    del mapping, array
    assert view.get().size == 10
    assert peer.live.opened == 1
    del view
    assert peer.live == NOTHING


def test_memory_is_closed_by_whichever_thread_drops_it_last_and_on_its_own_device(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    held = [mapping_of(allocation, mappings)]
    del peer.log[:]
    in_another_thread(held.clear)
    assert [name for name, _ in peer.log] == ["set_device", "close", "set_device"]
    assert [detail for name, detail in peer.log if name == "set_device"] == [DEVICE, 0]


def test_an_array_keeps_what_it_is_told_to_keep(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    class Owner:
        pass

    for memory in (allocation, mapping_of(allocation, mappings)):
        owner = Owner()
        is_alive = weakref.ref(owner)
        array = memory.array_at(0, BYTES, (1,), 1, owner)
        del owner
        assert is_alive() is not None
        del array
        assert is_alive() is None


def test_a_closed_mapping_makes_no_arrays(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mapping_of(allocation, mappings)
    mapping.close()
    mapping.close()
    assert mapping.is_closed
    with pytest.raises(ClosedError, match="this region is closed"):
        mapping.array_at(0, BYTES, (1,), 1)


def test_memory_that_cannot_be_closed_disturbs_nobody(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    mapping = mapping_of(allocation, mappings)
    peer.fail_next("close", "cudaErrorIllegalAddress")
    mapping.close()
    peer.close(mapping.address)  # it is still there to be closed


def test_threads_that_map_at_once_open_once(allocation: CudaAllocation) -> None:
    threads = 4
    arrived = threading.Barrier(threads)
    both_opening = threading.Barrier(2)
    met: list[str] = []

    class MeetingCuda(FakeCuda):
        """Waits, when it opens, for a second thread to do the same, which should not come."""

        def open(self, handle: bytes) -> int:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_opening.wait(0.2)
                met.append("two threads that open")
            return super().open(handle)

    meeting = MeetingCuda()
    mappings = CudaMappings(meeting)

    def map_it(_: int) -> CudaMapping:
        arrived.wait()
        return mapping_of(allocation, mappings)

    with ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(map_it, range(threads)))
    assert met == []
    assert len({mapping.address for mapping in made}) == times(meeting, "open") == 1
    made.clear()
    assert meeting.live == NOTHING


# Leases


@pytest.fixture
def fence() -> Iterator[int]:
    """A region, open, on which users of the memory show themselves to its owner."""
    region = ManagedRegion.create(1)
    yield region.segment.fileno()
    region.segment.unlink()
    region.close()


def leased(allocation: CudaAllocation, mappings: CudaMappings, fence: int) -> CudaMapping:
    return mappings.map(allocation.handle, SIZE, DEVICE, FIELD, use(fence))


def test_a_lease_is_held_until_the_memory_is_closed(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, fence: int
) -> None:
    mapping = leased(allocation, mappings, fence)
    array = whole(mapping)
    mapping.close()
    assert has_users(fence)
    del array
    assert (peer.live, has_users(fence)) == (NOTHING, False)


def test_the_lease_of_memory_that_is_mapped_already_is_the_first_ones(
    allocation: CudaAllocation, mappings: CudaMappings, fence: int
) -> None:
    first = leased(allocation, mappings, fence)
    second = leased(allocation, mappings, fence)
    first.close()
    assert has_users(fence)
    second.close()
    assert not has_users(fence)


@pytest.mark.parametrize("method", ["set_device", "open", "extent"])
def test_a_lease_is_given_back_when_the_memory_is_refused(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, fence: int, method: str
) -> None:
    peer.fail_next(method, "cudaErrorUnknown")
    with pytest.raises(RegionRefusedError):
        leased(allocation, mappings, fence)
    assert not has_users(fence)


# Refusing


@pytest.mark.parametrize("length", [0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1])
def test_a_handle_of_another_length_is_refused(mappings: CudaMappings, peer: FakeCuda, length: int) -> None:
    assert reason_against(mappings, b"\1" * length) == f"its handle has {length} bytes; expected {HANDLE_LENGTH}"
    assert peer.log == []


def test_less_than_was_allocated_may_be_claimed(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    mapping = mappings.map(allocation.handle, SIZE - 1, DEVICE, FIELD)
    assert mapping.byte_size == SIZE  # another claim may be of more


def test_more_than_was_allocated_is_refused_and_nothing_stays_open(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda
) -> None:
    reason = reason_against(mappings, allocation.handle, SIZE + 1)
    assert reason == f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"
    assert peer.live == NOTHING


def test_what_lies_before_the_memory_in_its_allocation_does_not_count(allocation: CudaAllocation) -> None:
    class InnerCuda(FakeCuda):
        """Opens memory that begins inside of a larger block."""

        def extent(self, address: int) -> tuple[int, int]:
            begin, byte_size = super().extent(address)
            return begin - 512, byte_size + 512

    inner = InnerCuda()
    mappings = CudaMappings(inner)
    mapping_of(allocation, mappings).close()
    assert reason_against(mappings, allocation.handle, SIZE + 1).endswith(f"an allocation of {SIZE}")
    assert inner.live == NOTHING


def test_freed_memory_is_refused(cuda: FakeCuda, mappings: CudaMappings) -> None:
    allocation = CudaAllocation(cuda, SIZE, DEVICE)
    allocation.free()
    reason = reason_against(mappings, allocation.handle)
    assert "cudaErrorInvalidResourceHandle" in reason
    assert "its owner has freed the memory" in reason
    assert "--ipc=host --pid=host" in reason


def test_memory_of_the_same_process_is_refused(allocation: CudaAllocation, cuda: FakeCuda) -> None:
    reason = reason_against(CudaMappings(cuda), allocation.handle)
    assert "cudaErrorDeviceUninitialized" in reason
    assert "exported by this very process, which has the memory already" in reason


def test_memory_on_another_device_is_refused(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    reason = reason_against(mappings, allocation.handle, device=0)
    assert "cudaErrorMapBufferObjectFailed" in reason
    assert "on a GPU that this process cannot reach" in reason


def test_memory_on_a_device_that_there_is_not_is_refused(allocation: CudaAllocation, mappings: CudaMappings) -> None:
    reason = reason_against(mappings, allocation.handle, device=2)
    assert "cudaErrorInvalidDevice" in reason
    assert "see CUDA_VISIBLE_DEVICES and --gpus" in reason


def test_what_is_no_handle_is_refused(mappings: CudaMappings) -> None:
    reason = reason_against(mappings, bytes(HANDLE_LENGTH))
    assert "cudaErrorInvalidValue" in reason
    assert "the handle is none of this machine's GPUs" in reason


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("cudaErrorNotSupported", "use CPU regions"),
        ("cudaErrorPeerAccessUnsupported", "give model and client the same GPU"),
        ("cudaErrorNoDevice", "see nvidia-smi"),
    ],
)
def test_what_cuda_refuses_is_told_with_a_remedy(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, name: str, remedy: str
) -> None:
    peer.fail_next("open", name)
    reason = reason_against(mappings, allocation.handle)
    assert name in reason
    assert remedy in reason


@pytest.mark.parametrize("method", ["current_device", "set_device", "open", "extent"])
def test_what_was_refused_leaves_nothing_open_and_may_be_tried_again(
    allocation: CudaAllocation, mappings: CudaMappings, peer: FakeCuda, method: str
) -> None:
    peer.fail_next(method, "cudaErrorUnknown")
    assert "cudaErrorUnknown: see CUDA's documentation" in reason_against(mappings, allocation.handle)
    gc.collect()
    assert peer.live == NOTHING
    assert whole(mapping_of(allocation, mappings)).get().size == SIZE


# Devices


def test_a_device_is_found_by_its_uuid_whatever_its_number(cuda: FakeCuda) -> None:
    peer = FakeCuda(uuids=[cuda.device_uuid(1), cuda.device_uuid(0)])
    assert [device_of(peer, cuda.device_uuid(device), FIELD) for device in (0, 1)] == [1, 0]


@pytest.mark.parametrize("devices", [0, 1])
def test_a_device_that_is_not_seen_is_refused_and_the_message_says_how_many_are(cuda: FakeCuda, devices: int) -> None:
    with pytest.raises(RegionRefusedError) as caught:
        device_of(FakeCuda(devices), cuda.device_uuid(1), FIELD)
    assert caught.value.field == FIELD
    assert f"it sees {devices}" in caught.value.reason
    assert "see CUDA_VISIBLE_DEVICES, --gpus and the model's instance_group" in caught.value.reason


def test_a_guard_makes_a_device_current_for_its_block(cuda: FakeCuda) -> None:
    with device_guard(cuda, 1):
        assert cuda.current_device() == 1
        with device_guard(cuda, 0):
            assert cuda.current_device() == 0
        assert cuda.current_device() == 1
        assert in_another_thread(cuda.current_device) == 0
    assert cuda.current_device() == 0


def test_a_guard_restores_the_device_after_an_error(cuda: FakeCuda) -> None:
    with pytest.raises(ZeroDivisionError), device_guard(cuda, 1):
        print(1 / 0)
    assert cuda.current_device() == 0


def test_a_guard_for_a_device_that_there_is_not_leaves_the_current_one(cuda: FakeCuda) -> None:
    entered: list[int] = []
    with fails_by("cudaErrorInvalidDevice"), device_guard(cuda, 2):
        entered.append(2)
    assert entered == []
    assert cuda.current_device() == 0


def test_a_guard_for_the_current_device_asks_nothing_of_cuda(cuda: FakeCuda) -> None:
    with device_guard(cuda, 0):
        pass
    assert cuda.log == []


# Loading


def test_cuda_is_loaded_when_it_is_needed_and_once() -> None:
    loaded: list[FakeCuda] = []

    def load() -> CudaRuntime:
        loaded.append(FakeCuda())
        return loaded[-1]

    access = CudaAccess(load)
    assert loaded == []
    mappings = access.mappings
    assert access.mappings is mappings
    assert [access.runtime, mappings.runtime] == [loaded[0], loaded[0]]
    assert len(loaded) == 1


def test_cuda_that_could_not_be_loaded_is_tried_again() -> None:
    outcomes: list[CudaRuntime | MachineError] = [MachineError("there is no GPU yet"), FakeCuda()]

    def load() -> CudaRuntime:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MachineError):
            raise outcome
        return outcome

    access = CudaAccess(load)
    with pytest.raises(MachineError, match="there is no GPU yet"):
        access.runtime  # noqa: B018
    assert isinstance(access.runtime, FakeCuda)


# Two processes


OWNER = f"""
import os, sys
import numpy as np
from shm_backend_utils.memory.cuda.memory import CudaAllocation
from shm_backend_utils.memory.locks import has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

cuda = FakeCuda()
allocation = CudaAllocation(cuda, {SIZE}, {DEVICE})
array = allocation.array_at(0, np.dtype(np.uint8), ({SIZE},), {SIZE}, None)
print(allocation.handle.hex(), allocation.device_uuid, flush=True)
for line in sys.stdin:
    index, value = map(int, line.split())
    print(array.get()[index], flush=True)
    array[index] = value
    cuda.synchronize(cuda.current_stream().ptr)
    print("written", flush=True)
del array
allocation.free()
print(cuda.live, flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that allocates memory, tells its handle, and then takes lines: an index, and what to write there."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def mapping_from(process: subprocess.Popen[str], mappings: CudaMappings) -> CudaMapping:
    handle, uuid = line_of(process).split()
    device = device_of(mappings.runtime, uuid, FIELD)
    return mappings.map(bytes.fromhex(handle), SIZE, device, FIELD)


def test_what_one_process_writes_the_other_reads(owner: subprocess.Popen[str], mappings: CudaMappings) -> None:
    array = whole(mapping_from(owner, mappings))
    array.peek()[3] = 77
    assert owner.stdin is not None
    print(3, 99, file=owner.stdin, flush=True)
    assert line_of(owner) == "77"
    assert line_of(owner) == "written"
    assert array.get()[3] == 99
    owner.stdin.close()
    assert line_of(owner) == str(NOTHING)


def test_memory_of_a_killed_process_is_refused(owner: subprocess.Popen[str], mappings: CudaMappings) -> None:
    mapping = mapping_from(owner, mappings)
    handle = mapping.handle
    mapping.close()
    owner.kill()
    owner.wait()
    assert "cudaErrorInvalidResourceHandle" in reason_against(mappings, handle)
    assert objects_of(owner.pid) == []
