"""Device memory is provided to slots, up to a budget for each GPU."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import BudgetError, MachineError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.memory.cuda.runtime import BLOCK_BYTES, CudaRuntime
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.device_bank.conftest import LIMIT, SIZE, MakeRegion
from tests.unit.gpus import fails_by, that_nobody_loads

GPU_BYTES = 4 * 2**30
"""What each GPU of the fake driver has."""


def test_a_slot_has_what_it_needs_on_every_device(driver: FakeDriver, bank: DeviceBank, new_region: MakeRegion) -> None:
    region = new_region((0, 1))
    assert {device: each.byte_size for device, each in region.device_memory.items()} == {0: SIZE, 1: SIZE}
    assert [each.device for each in region.device_memory.values()] == [0, 1]
    bank.provide(region, (0, 1), (SIZE, SIZE))  # it has them
    assert driver.count("cuMemAlloc") == 2


@pytest.mark.parametrize("byte_size", [GPU_BYTES + 1, 2**63, 2**80])
def test_what_the_gpu_does_not_have_is_not_waited_for(gpu: CudaRuntime, driver: FakeDriver, byte_size: int) -> None:
    bank = DeviceBank(CudaAccess(lambda: gpu), None)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    with pytest.raises(BudgetError, match=rf"bytes on GPU 0, which has {GPU_BYTES}; send less at once"):
        bank.provide(region, [0], [byte_size])
    assert driver.count("cuMemAlloc") == 0
    region.destroy()
    assert not bank.collect()


def test_a_bank_that_provides_nothing_does_not_load_cuda(gpu: CudaRuntime) -> None:
    with that_nobody_loads(gpu) as access:
        bank = DeviceBank(access, None)
        region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
        bank.provide(region, (), ())
        region.destroy()
        bank.collect()
        bank.close()
        bank.abandon()


def test_where_there_is_no_cuda_the_error_says_so_and_nothing_is_counted() -> None:
    def load() -> CudaRuntime:
        raise MachineError("GPU memory needs NVIDIA's driver")

    bank = DeviceBank(CudaAccess(load), SIZE)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    for _ in range(2):
        with pytest.raises(MachineError, match="needs NVIDIA's driver") as caught:
            bank.provide(region, [0], [SIZE])
        assert not isinstance(caught.value, ShortOfMemoryError)
    region.destroy()
    bank.close()


# Budget


def test_each_device_gives_up_to_the_budget(new_region: MakeRegion) -> None:
    for _ in range(2):
        new_region((0, 1), 1)  # CUDA gives whole blocks, however little is asked for
    for device in (0, 1):
        with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU {device} are in use"):
            new_region((device,))


def test_what_can_never_fit_is_refused_at_once_with_the_option_that_would_help(
    driver: FakeDriver, new_region: MakeRegion
) -> None:
    with pytest.raises(
        BudgetError,
        match=rf"needs {LIMIT + SIZE} bytes on GPU 0, but the pool may have {LIMIT}; raise .*max_device_bytes",
    ):
        new_region(byte_size=LIMIT + 1)
    assert driver.count("cuMemAlloc") == 0


def test_memory_that_the_device_does_not_have_may_be_there_later(driver: FakeDriver, new_region: MakeRegion) -> None:
    driver.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ShortOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        new_region(byte_size=LIMIT)
    new_region(byte_size=LIMIT)  # the attempt is not counted


@pytest.mark.parametrize(
    ("function", "name"), [("cuMemAlloc", "CUDA_ERROR_NO_DEVICE"), ("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED")]
)
def test_any_other_failure_is_told_as_it_is_and_leaves_nothing(
    driver: FakeDriver, new_region: MakeRegion, function: str, name: str
) -> None:
    driver.fail_next(function, name)
    with fails_by(name):
        new_region(byte_size=LIMIT)
    gc.collect()  # the error has had the frames, and what they hold
    assert new_region(byte_size=LIMIT).device_memory[0].byte_size == LIMIT


def test_a_slot_for_which_one_device_has_no_room_keeps_what_the_other_gave(
    driver: FakeDriver, bank: DeviceBank, new_region: MakeRegion
) -> None:
    in_the_way = new_region((1,), LIMIT)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    with pytest.raises(ShortOfMemoryError):
        bank.provide(region, (0, 1), (SIZE, SIZE))
    assert list(region.device_memory) == [0]
    in_the_way.destroy()
    bank.provide(region, (0, 1), (SIZE, SIZE))
    assert driver.count("cuMemAlloc") == 3
    region.destroy()


@given(st.integers(1, 2**50))
def test_a_size_is_rounded_up_by_an_eighth_or_to_whole_blocks(byte_size: int) -> None:
    rounded = rounded_up(byte_size)
    assert byte_size <= rounded < byte_size + max(BLOCK_BYTES, byte_size / 8)
    assert rounded % BLOCK_BYTES == 0
    assert rounded_up(rounded) == rounded
