"""Calls of other models with tensors on GPUs: what is given there, what is wanted there, and what may be lent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.mappings import CudaMappings
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model.devices.arrays import DeviceArrays
from shm_backend_utils.model.forward.lending import Lending, LentMemory
from shm_backend_utils.model.forward.ordinary import Asked, Given, OrdinaryForwarding
from shm_backend_utils.model.mapping.memory import DeviceMemory, HostMemory
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.tensors.cuda.device_array import DeviceArray
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.emulator.response import InferenceResponse
from shm_backend_utils.testing.emulator.tensor import Tensor
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import start_server
from tests.unit.fake_gpu import (
    BLOCK,
    CLIENT,
    INTEGERS,
    SIZE,
    array_on,
    content,
    runtime_that_gives_all_back,
    wait_until,
)

INT32 = dtypes.BY_NAME["INT32"]
NUMBERS = [0, 1, 2, 3]


@pytest.fixture
def cuda() -> Iterator[CudaRuntime]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda


@pytest.fixture
def arrays(cuda: CudaRuntime) -> Iterator[DeviceArrays]:
    arrays = DeviceArrays(CudaAccess(lambda: cuda), 0)
    yield arrays
    wait_until(lambda: not cuda.retired.collect())
    arrays.close()


def tensor_on(cuda: CudaRuntime | None) -> Any:
    return np.arange(4, dtype=INTEGERS) if cuda is None else array_on(cuda, NUMBERS, dtype=INTEGERS)


def test_an_array_on_a_gpu_is_given_as_it_is_and_copied_for_who_reads_on_the_host(
    cuda: CudaRuntime, arrays: DeviceArrays
) -> None:
    array = tensor_on(cuda)
    view = arrays.view("X", array, INT32, "triton", writable=False)
    for value in (array, view):
        given = Given("X", value, arrays)
        assert (given.array.address, given.dtype, given.shape) == (array.address, INT32, (4,))
        assert given.bytes_on_host().tolist() == given.elements_on_host().tolist() == NUMBERS


@pytest.mark.parametrize("is_wanted_there", [False, True], ids=["wanted on the host", "wanted on a GPU"])
@pytest.mark.parametrize("comes_from_there", [False, True], ids=["from the host", "from a GPU"])
def test_an_output_is_copied_to_where_it_is_wanted(
    cuda: CudaRuntime,
    arrays: DeviceArrays,
    monkeypatch: pytest.MonkeyPatch,
    is_wanted_there: bool,
    comes_from_there: bool,
) -> None:
    monkeypatch.setattr(TritonBackend, "request", lambda *_: object())
    start_server(monkeypatch)
    target = TensorView("Y", np.zeros(4, INTEGERS), INT32, "direct")
    if is_wanted_there:
        target = arrays.empty("Y", (4,), INT32, "direct")
        content(target.array)[...] = 0
    forwarding = OrdinaryForwarding(Asked("other", "", {}, {"Y": target}, ["Y"], {}), TritonBackend(), arrays)
    given = Tensor("Y", tensor_on(None))
    if comes_from_there:
        given = Tensor.from_dlpack("Y", tensor_on(cuda).__dlpack__(stream=-1))
    response = InferenceResponse([given])
    assert forwarding.result(response) == {"Y": target}
    found = content(target.array) if is_wanted_there else target.numpy()
    assert found.tolist() == NUMBERS
    monkeypatch.undo()
    del forwarding, target, given, response, found


# Lending


@pytest.mark.parametrize("fence", [None, 0, 1])
def test_memory_of_a_gpu_is_lent_with_the_region_that_fences_it(cuda: CudaRuntime, fence: int | None) -> None:
    with runtime_that_gives_all_back(CLIENT) as owner:
        allocation = CudaAllocation(owner, SIZE, 0)
        mapping = CudaMappings(cuda).map(allocation.handle, BLOCK, 0, "regions[1]")
        slots = [LentRegionClaim(f"key {number}", 64, "00" * 16, 0) for number in range(2)]
        own = [LentMemory(slot, HostMemory(np.zeros(64, np.uint8))) for slot in slots]
        own.append(LentMemory(claim_of_allocation(allocation, fence=fence), DeviceMemory(mapping, 0, BLOCK)))
        pool = SlotPool(PoolOptions(max_bytes=1 << 20))
        lending = Lending(own, pool)
        array = DeviceArray(cuda, mapping.address + 8, (4,), INTEGERS, 0, mapping.keeper)
        lent = 1 if fence is None else 2
        assert lending.place_of(array) == (lent, 8)
        fences = [] if fence is None else [slots[fence]]
        claim = claim_of_allocation(allocation, fence=None if fence is None else 1, event=b"")
        assert lending.claims == [*fences, claim]
        pool.close()
        del lending, own, array
        mapping.close()
        wait_until(lambda: not cuda.retired.collect())
        allocation.free()
