"""Device memory that is mapped: opened once, seen by both sides, and closed after the last array."""

from __future__ import annotations

import contextlib
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.memory.cuda.memory import CudaAllocation, CudaMapping, CudaMappings
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray
from tests.unit.cuda_memory.device_memory import DEVICE, FIELD, FLOATS, NOTHING, mapping_of, times, whole
from tests.unit.fake_gpu import BYTES, SIZE, in_another_thread


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
