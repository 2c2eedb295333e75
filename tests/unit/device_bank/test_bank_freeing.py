"""Device memory is freed when its slot is gone and no model has it mapped; not before."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from tests.unit.fake_gpu_events import PATIENCE_S

from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError
from shm_backend_utils.memory.cuda.memory import CudaMappings
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.device_bank.bank_calls import LIMIT, SHM, SIZE, MakeRegion, times
from tests.unit.fake_gpu import BYTES


class Model:
    """What a model has of a region: the device memory, mapped, and the lease that says so."""

    def __init__(self, region: SlotRegion, device: int = 0) -> None:
        allocation = region.device_memory[device].allocation
        fd = os.open(SHM / region.key, os.O_RDWR)
        self._mappings = CudaMappings(FakeCuda())
        lease = use(fd)
        os.close(fd)
        mapping = self._mappings.map(allocation.handle, allocation.byte_size, device, "region", lease)
        self._array = mapping.array_at(0, BYTES, (allocation.byte_size,), allocation.byte_size)

    def write(self, value: int) -> None:
        assert self._array is not None
        self._array.peek()[:] = value

    def let_go(self) -> None:
        self._array = None


def test_memory_of_a_destroyed_slot_is_freed_once_nobody_has_it_mapped(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region((0, 1))
    region.destroy()
    bank.collect()
    assert cuda.live.allocations == 0
    assert times(cuda, "free") == 2


def test_memory_that_a_model_has_mapped_is_not_freed(cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion) -> None:
    region = new_region()
    model = Model(region)
    region.destroy()
    bank.collect()
    assert cuda.live.allocations == 1
    model.write(7)  # on a GPU, this would be undefined if the memory was freed
    model.let_go()
    bank.collect()
    assert cuda.live.allocations == 0


def test_memory_that_a_model_has_mapped_counts_and_is_nobody_elses(bank: DeviceBank, new_region: MakeRegion) -> None:
    region = new_region(byte_size=LIMIT)
    model = Model(region)
    region.destroy()
    with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU 0 are in use"):
        new_region()
    model.let_go()
    new_region()


def test_memory_that_several_models_have_mapped_is_freed_after_the_last(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    models = [Model(region), Model(region)]
    region.destroy()
    live = []
    for model in models:
        model.let_go()
        bank.collect()
        live.append(cuda.live.allocations)
    assert live == [1, 0]


def test_a_model_that_keeps_one_slots_memory_keeps_no_other(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    regions = [new_region(), new_region((1,)), new_region()]
    model = Model(regions[1], device=1)
    for region in regions:
        region.destroy()
    bank.collect()
    assert cuda.live.allocations == 1
    model.write(7)
    model.let_go()


def test_all_memory_of_a_slot_stays_while_a_model_has_some_of_it_mapped(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region((0, 1))
    model = Model(region, device=1)
    region.destroy()
    bank.collect()
    assert cuda.live.allocations == 2
    model.let_go()


def test_memory_is_freed_after_the_users_last_array(cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion) -> None:
    region = new_region()
    array = region.device_memory[0].array_at(np.empty(0, np.uint8), 0, BYTES, (SIZE,))
    region.destroy()
    bank.collect()
    assert array.get().size == SIZE
    assert cuda.live.allocations == 1
    del array
    assert cuda.live.allocations == 0


def test_burying_waits_for_nothing_as_finalizers_do_it(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    with bank._lock:
        region.destroy()
    assert times(cuda, "free") == 0
    bank.collect()
    assert times(cuda, "free") == 1


def test_a_slot_is_buried_once(cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion) -> None:
    region = new_region()
    region.destroy()
    region.destroy()
    bank.collect()
    assert times(cuda, "free") == 1


# Closing


def test_a_bank_that_is_closed_frees_what_nobody_uses(cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion) -> None:
    new_region().destroy()
    bank.close()
    assert cuda.live.allocations == 0


def test_what_models_still_use_is_freed_after_the_bank_was_closed_when_they_let_go(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    model = Model(region)
    region.destroy()
    bank.close()
    (undertaker,) = [thread for thread in threading.enumerate() if thread.name == "shm device memory"]
    assert cuda.live.allocations == 1
    model.let_go()
    undertaker.join(PATIENCE_S)
    assert not undertaker.is_alive()
    assert cuda.live.allocations == 0
