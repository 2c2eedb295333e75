"""Arrays of FakeCuda: as much of CuPy's as is needed, and the ways from one library to another."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.runtime import device_guard
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, FakeDeviceArray, LiveCounts, kernel
from tests.unit.fake_gpu import (
    BYTES,
    INTEGERS,
    INVALID_VALUE,
    SIZE,
    bytes_at,
    fails_by,
    numbers,
    objects_of,
    runtime_that_gives_all_back,
)


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


def test_an_array_knows_what_it_is(cuda: FakeCuda, memory: int) -> None:
    array = cuda.array(memory, (2, 3), INTEGERS, 0, None)
    assert (array.shape, array.dtype, array.ndim, array.nbytes, len(array)) == ((2, 3), INTEGERS, 2, 24, 2)
    assert (array.device, array.__dlpack_device__(), cuda.address_of(array)) == (0, (2, 0), memory)
    assert repr(array) == f"<FakeDeviceArray int32 [2, 3] GPU 0 at {memory:#x}>"


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE + 1), (SIZE - 1, 2), (SIZE, 1), (-1, 1)])
def test_an_array_lies_inside_an_allocation(cuda: FakeCuda, memory: int, offset: int, length: int) -> None:
    with fails_by(INVALID_VALUE):
        bytes_at(cuda, memory + offset, length)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_an_array_without_bytes_needs_no_memory(cuda: FakeCuda, shape: tuple[int, ...]) -> None:
    for array in (cuda.empty(shape, BYTES), cuda.array(0, shape, BYTES, 0, None)):
        assert array.get().shape == cuda.adopt(array.transpose()).transpose().shape == shape
        assert cuda.live == LiveCounts()


def test_an_array_keeps_its_owner_and_so_do_its_views(cuda: FakeCuda, memory: int) -> None:
    owner = object()
    view = cuda.array(memory, (4, 4), BYTES, 0, owner)[1:].transpose()
    assert view.owner is owner


def test_memory_of_an_array_goes_with_its_last_view(cuda: FakeCuda) -> None:
    array = numbers(cuda, 4)
    view = array[2:]
    del array
    assert cuda.live == LiveCounts(allocations=1)
    assert view.get().tolist() == [2, 3]
    del view
    assert cuda.live == LiveCounts()


def test_memory_of_an_array_is_kept_for_what_is_on_a_stream(cuda: FakeCuda) -> None:
    result = cuda.empty((3,), INTEGERS)
    cuda.copy(result, numbers(cuda, 3), cuda.current_stream().ptr)
    gc.collect()
    assert result.get().tolist() == [0, 1, 2]


def test_what_is_on_a_stream_keeps_no_owner(cuda: FakeCuda, memory: int) -> None:
    class Owner:
        pass

    owner = Owner()
    is_alive = weakref.ref(owner)
    array = cuda.array(memory, (4,), BYTES, 0, owner)
    cuda.copy(array[:2], array[2:], cuda.current_stream().ptr)
    array.fill(0)
    del array, owner
    assert is_alive() is None


def test_a_kernel_works_on_writable_views_of_its_arrays(cuda: FakeCuda) -> None:
    source, target = numbers(cuda, 3), cuda.empty((3,), INTEGERS)
    kernel(lambda source, target: np.multiply(source, 2, out=target), source, target)
    assert target.peek().tolist() != [0, 2, 4]
    assert target.get().tolist() == [0, 2, 4]


def test_getting_an_array_waits_for_the_current_stream_and_no_other(cuda: FakeCuda) -> None:
    array, stream = numbers(cuda, 2), cuda.stream()
    with stream:
        array.fill(9)
    assert array.get().tolist() == [0, 1]
    with stream:
        assert array.get().tolist() == [9, 9]


def test_elements_are_set_by_index(cuda: FakeCuda) -> None:
    array = cuda.empty((4,), INTEGERS)
    array.fill(0)
    array[0] = 1
    array[1:3] = np.array([2, 3])
    array[3:] = array[:1]
    assert array.get().tolist() == [1, 2, 3, 1]


def test_a_view_of_an_index_shares_memory(cuda: FakeCuda) -> None:
    array = numbers(cuda, 3, 4)
    for key in (1, slice(1, None), (..., 2), (slice(None, None, 2), slice(1, 3)), (None, 2, 3)):
        expected = np.arange(12).reshape(3, 4)[key]
        assert (array[key].get() == expected).all()
        assert array[key].shape == expected.shape
    array[1][2] = 50
    assert array.get()[1, 2] == 50
    with pytest.raises(TypeError, match="takes integers, slices, None and ... as index"):
        array[[0, 1]]


def test_an_array_may_be_strided(cuda: FakeCuda) -> None:
    array = numbers(cuda, 3, 4)
    turned = array.transpose()
    assert (turned.get() == np.arange(12).reshape(3, 4).T).all()
    assert turned.get().flags.c_contiguous
    assert array.transpose(0, 1).get().tolist() == array.get().tolist()
    contiguous = {
        "whole": array,
        "rows": array[1:],
        "column of one row": array[:1, :1],
        "nothing": array[:0].transpose(),
    }
    assert [name for name, view in contiguous.items() if not cuda.is_contiguous(view)] == []
    assert not any(cuda.is_contiguous(view) for view in (turned, array[:, 1:], array[::2]))


def test_an_array_does_not_become_numpys_by_itself(cuda: FakeCuda) -> None:
    with pytest.raises(TypeError, match=r"call .get\(\) for a copy"):
        np.asarray(numbers(cuda, 2))


# Other libraries' arrays


class Stranger:
    """What has ``__cuda_array_interface__`` alone."""

    def __init__(self, array: FakeDeviceArray) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


class Producer:
    """What has ``__dlpack__`` alone."""

    def __init__(self, array: FakeDeviceArray, kind: int = 2) -> None:
        self.array = array
        self.kind = kind
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.array.device

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)


@pytest.mark.parametrize("wrap", [Stranger, Producer])
def test_what_is_adopted_shares_its_memory_and_keeps_it(cuda: FakeCuda, wrap: Callable[[FakeDeviceArray], Any]) -> None:
    with device_guard(cuda, 1):
        array = numbers(cuda, 2, 3).transpose()
    address = array.address
    adopted = cuda.adopt(wrap(array))
    del array
    gc.collect()
    assert (adopted.address, adopted.device, adopted.shape) == (address, 1, (3, 2))
    assert adopted.get().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_array_of_its_own_is_adopted_as_it_is(cuda: FakeCuda) -> None:
    array = numbers(cuda, 2)
    assert cuda.adopt(array) is array


def test_what_comes_later_on_the_adopters_stream_waits_for_the_producers(cuda: FakeCuda) -> None:
    array, consumer = numbers(cuda, 2), cuda.stream()
    array.fill(5)
    with consumer:
        adopted = cuda.adopt(Producer(array))  # on the thread's stream, nothing is current but the consumer's
    producer = cuda.current_stream()
    capsule = cuda.capsule(array, consumer.ptr, None)
    assert ("order", (producer.ptr, consumer.ptr)) in cuda.log
    with consumer:
        assert cuda.adopt(capsule).get().tolist() == adopted.peek().tolist() == [5, 5]


@pytest.mark.parametrize(("stream", "orders"), [(None, 1), (1, 1), (2, 1), (-1, 0)])
def test_a_capsule_is_ordered_before_its_consumers_stream(cuda: FakeCuda, stream: int | None, orders: int) -> None:
    capsule = numbers(cuda, 2).__dlpack__(stream=stream, max_version=(1, 0))
    assert capsule.max_version == (1, 0)
    assert sum(operation == "order" for operation, _ in cuda.log) == orders


def test_a_capsule_for_stream_0_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="stream 0 is ambiguous"):
        numbers(cuda, 2).__dlpack__(stream=0)


def test_a_capsule_is_taken_over_once(cuda: FakeCuda) -> None:
    capsule = numbers(cuda, 2).__dlpack__()
    assert cuda.adopt(capsule).get().tolist() == [0, 1]
    with pytest.raises(ValueError, match="taken over before"):
        cuda.adopt(capsule)


def test_what_is_not_on_a_gpu_is_not_adopted(cuda: FakeCuda) -> None:
    with pytest.raises(BufferError, match="DLPack device type 1; expected 2"):
        cuda.adopt(np.zeros(3))
    with pytest.raises(TypeError, match="list has neither __dlpack__ nor __cuda_array_interface__"):
        cuda.adopt([])


def test_an_array_of_another_process_is_not_adopted(cuda: FakeCuda, peer: FakeCuda) -> None:
    with fails_by(INVALID_VALUE):
        peer.adopt(Stranger(numbers(cuda, 2)))
