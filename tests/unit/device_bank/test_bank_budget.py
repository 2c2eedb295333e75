"""Device memory is provided to slots, up to a budget for each GPU."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.client.errors import BudgetError
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.device_bank.bank_calls import LIMIT, SIZE, MakeRegion, pool_and_opening, times
from tests.unit.fake_gpu import fails_by, that_nobody_loads

OUT_OF_MEMORY = "cudaErrorMemoryAllocation"


def test_a_slot_has_what_it_needs_on_every_device(cuda: FakeCuda, new_region: MakeRegion) -> None:
    region = new_region((0, 1))
    assert {device: each.allocation.byte_size for device, each in region.device_memory.items()} == {0: SIZE, 1: SIZE}
    assert [each.allocation.device for each in region.device_memory.values()] == [0, 1]
    assert cuda.live.allocations == 2


def test_what_a_slot_has_already_is_not_allocated_again(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    first = region.device_memory[0]
    bank.provide(region, (0, 1), (SIZE, SIZE))
    assert region.device_memory[0] is first
    assert times(cuda, "allocate") == 2


def test_a_table_names_the_device_memory_and_the_slot_that_fences_it(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=1, B=0)
        region = exchange._region
        exchange._slot.begin(table.encode(exchange._table))
        found = decoded_table(region)
        allocations = [region.device_memory[device].allocation for device in (0, 1)]
        assert list(found.regions) == [
            CudaRegionClaim(each.handle, each.byte_size, each.device_uuid, 0) for each in allocations
        ]
        assert (found.inputs["A"].region, found.inputs["B"].region) == (2, 1)
        del region
        exchange.close()


def test_a_bank_that_provides_nothing_does_not_load_cuda(cuda: FakeCuda) -> None:
    with that_nobody_loads(cuda) as access:
        bank = DeviceBank(access, None)
        region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
        bank.provide(region, (), ())
        region.destroy()
        bank.collect()
        bank.close()


def test_where_there_is_no_cuda_the_error_says_so_and_nothing_is_counted() -> None:
    def load() -> FakeCuda:
        raise MachineError("GPU memory needs CuPy, which is not installed")

    bank = DeviceBank(CudaAccess(load), SIZE)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    for _ in range(2):
        with pytest.raises(MachineError, match="needs CuPy") as caught:
            bank.provide(region, [0], [SIZE])
        assert not isinstance(caught.value, ShortOfMemoryError)
    region.destroy()


# Budget


def test_each_device_gives_up_to_the_budget(bank: DeviceBank, new_region: MakeRegion) -> None:
    for _ in range(2):
        new_region((0, 1))
    for device in (0, 1):
        with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU {device} are in use"):
            new_region((device,))


def test_what_does_not_fit_now_fits_when_a_slot_was_destroyed(new_region: MakeRegion) -> None:
    first, _ = new_region(), new_region()
    with pytest.raises(ShortOfMemoryError):
        new_region()
    first.destroy()
    new_region()


def test_what_can_never_fit_is_refused_at_once_with_the_option_that_would_help(
    cuda: FakeCuda, new_region: MakeRegion
) -> None:
    with pytest.raises(
        BudgetError,
        match=rf"needs {LIMIT + 1} bytes on GPU 0, but the pool may have {LIMIT}; raise PoolOptions.max_device_bytes",
    ):
        new_region(byte_size=LIMIT + 1)
    assert times(cuda, "allocate") == 0


def test_the_whole_budget_may_be_one_slots(new_region: MakeRegion) -> None:
    assert new_region(byte_size=LIMIT).device_memory[0].allocation.byte_size == LIMIT


def test_a_bank_without_a_budget_gives_what_the_device_has(cuda: FakeCuda) -> None:
    with contextlib.closing(DeviceBank(CudaAccess(lambda: cuda), None)) as bank:
        region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
        bank.provide(region, [0], [100 * SIZE])
        region.destroy()


def test_memory_that_the_device_does_not_have_may_be_there_later(cuda: FakeCuda, new_region: MakeRegion) -> None:
    cuda.fail_next("allocate", OUT_OF_MEMORY)
    with pytest.raises(ShortOfMemoryError, match=OUT_OF_MEMORY):
        new_region(byte_size=LIMIT)
    new_region(byte_size=LIMIT)  # the attempt is not counted


@pytest.mark.parametrize(("method", "name"), [("allocate", "cudaErrorNoDevice"), ("export", "cudaErrorNotSupported")])
def test_any_other_failure_is_told_as_it_is_and_leaves_nothing(
    cuda: FakeCuda, new_region: MakeRegion, method: str, name: str
) -> None:
    cuda.fail_next(method, name)
    with fails_by(name):
        new_region(byte_size=LIMIT)
    assert new_region(byte_size=LIMIT).device_memory[0].allocation.byte_size == LIMIT


def test_a_slot_for_which_one_device_has_no_room_keeps_what_the_other_gave(
    cuda: FakeCuda, bank: DeviceBank, new_region: MakeRegion
) -> None:
    in_the_way = new_region((1,), LIMIT)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    with pytest.raises(ShortOfMemoryError):
        bank.provide(region, (0, 1), (SIZE, SIZE))
    in_the_way.destroy()
    bank.provide(region, (0, 1), (SIZE, SIZE))
    assert times(cuda, "allocate") == 3
    region.destroy()


@given(st.integers(1, 2**50))
def test_a_size_is_rounded_up_by_an_eighth_or_some_pages_at_most(byte_size: int) -> None:
    rounded = rounded_up(byte_size)
    assert byte_size <= rounded < byte_size + max(SIZE, byte_size / 8)
    assert rounded % 256 == 0
    assert rounded_up(rounded) == rounded


def test_calls_of_similar_sizes_get_the_same_size() -> None:
    assert len({rounded_up(byte_size) for byte_size in range(1, SIZE, 100)}) == 1
    assert len({rounded_up(byte_size) for byte_size in range(1_000_000, 1_040_000, 1000)}) == 1


def decoded_table(region: SlotRegion) -> Table:
    _, found = table.decode(bytes(region.slots[0].record.request), region.data_offset, region.byte_size)
    return found
