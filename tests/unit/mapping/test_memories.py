"""Memory of the host and of GPUs as a request has it: what lies in it, what follows what, what is no tensor there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME, BYTES
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMapping, CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model.mapping.memory import DeviceMemory, HostMemory
from tests.unit.fake_gpu import CLIENT, MODEL, SIZE, array_on, runtime_that_gives_all_back

FP32 = BY_NAME["FP32"]


@pytest.fixture
def owner() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back(CLIENT) as cuda:
        yield cuda


@pytest.fixture
def cuda(allocations: list[CudaAllocation]) -> Iterator[CudaRuntime]:
    """That of the process which maps the owner's memory."""
    with runtime_that_gives_all_back(MODEL) as cuda:
        yield cuda


@pytest.fixture
def allocations(owner: CudaRuntime) -> Iterator[list[CudaAllocation]]:
    allocations = [CudaAllocation(owner, SIZE, 0) for _ in range(2)]
    yield allocations
    for allocation in allocations:
        allocation.free()


@pytest.fixture
def mappings(cuda: CudaRuntime, allocations: list[CudaAllocation]) -> Iterator[list[CudaMapping]]:
    """One of each allocation, and a second one of the first."""
    opened = CudaMappings(cuda)
    mappings = [opened.map(each.handle, SIZE, 0, "regions[1]") for each in (*allocations, allocations[0])]
    yield mappings
    mappings.clear()


@pytest.fixture
def host() -> HostMemory:
    return HostMemory(np.zeros(SIZE, np.uint8))


def test_an_array_lies_in_host_memory_if_it_is_one_of_the_hosts_and_contiguous(
    host: HostMemory, cuda: CudaRuntime
) -> None:
    assert host.offset_of(host.array[8:]) == 8
    assert host.part(100, 100).offset_of(host.array[8:]) == -92
    assert host.offset_of(host.array[8::2]) is None
    assert host.offset_of(array_on(cuda, [1, 2])) is None


def test_an_array_lies_in_device_memory_if_it_is_one_of_a_gpus_and_contiguous(mappings: list[CudaMapping]) -> None:
    device = DeviceMemory(mappings[0], 0, SIZE)
    array = device.bytes()
    assert device.offset_of(array[8:]) == 8
    assert device.part(100, 100).offset_of(array[8:]) == -92
    assert device.offset_of(np.zeros(4, np.uint8)) is None


def test_parts_of_one_mapping_follow_each_other_and_no_others(host: HostMemory, mappings: list[CudaMapping]) -> None:
    device = DeviceMemory(mappings[0], 0, SIZE)
    assert host.part(0, 8).follows(host.part(8, 8))
    assert not host.follows(HostMemory(host.array.copy()))
    assert not host.follows(device)
    assert not device.follows(host)


def test_mappings_of_one_allocation_follow_each_other_and_no_others(mappings: list[CudaMapping]) -> None:
    one, another, same = (DeviceMemory(mapping, 0, SIZE) for mapping in mappings)
    assert one.follows(same)
    assert not one.follows(another)


def test_a_tensor_fits_its_span_exactly_or_it_is_none(host: HostMemory, mappings: list[CudaMapping]) -> None:
    device = DeviceMemory(mappings[0], 0, SIZE)
    for memory in (host, device):
        assert memory.view("X", 8, 16, FP32, (4,), writable=False) is not None
        assert memory.view("X", 8, 15, FP32, (4,), writable=False) is None


@pytest.mark.parametrize("writable", [False, True])
def test_a_view_on_a_gpu_is_over_the_mapping_and_keeps_it(mappings: list[CudaMapping], writable: bool) -> None:
    device = DeviceMemory(mappings[0], 100, SIZE)
    view = device.view("X", 8, 16, FP32, (2, 2), writable=writable)
    assert view is not None
    assert (view.array.address, view.shape, view.writable) == (mappings[0].address + 108, (2, 2), writable)
    assert view.attributes.cuda_ipc_handle == mappings[0].handle
    mappings[0].close()
    with pytest.raises(ClosedError):
        device.view("X", 8, 16, FP32, (2, 2), writable=writable)
    assert view.array.to_host().shape == (2, 2)


def test_strings_are_read_on_the_host_and_nowhere_else(host: HostMemory, mappings: list[CudaMapping]) -> None:
    device = DeviceMemory(mappings[0], 0, SIZE)
    host.array[:6] = [2, 0, 0, 0, *b"ab"]
    view = host.view("X", 0, 6, BYTES, (1,), writable=False)
    assert view is not None
    assert view.numpy().tolist() == [b"ab"]
    assert device.view("X", 0, 600, BYTES, (1,), writable=False) is None
