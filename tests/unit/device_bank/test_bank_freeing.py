"""Device memory of slots: up to a budget for each GPU, and freed when its slot is gone and no model has it mapped."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import BudgetError, MachineError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.gpu.runtime import BLOCK_BYTES, CudaRuntime
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.device_bank.conftest import LIMIT, SIZE, MakeRegion, Model, collectors, eventually
from tests.unit.gpus import PATIENCE_S, fails_by, that_nobody_loads


class Kept:
    """Something that can be seen to be gone."""

    def watch(self) -> Callable[[], bool]:
        seen = weakref.ref(self)
        return lambda: seen() is not None


def collect_all(bank: DeviceBank) -> None:
    """Free what can be freed, when the GPU has finished with it."""
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while bank.collect() and (not bank._given_up or bank.cuda.has_retired):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_memory_of_a_destroyed_slot_is_freed_once_nobody_has_it_mapped(
    driver: FakeDriver, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region((0, 1))
    region.destroy()
    collect_all(bank)
    assert (driver.live().allocations, driver.live().events) == (0, 0)
    assert driver.count("cuMemFree") == 2


def test_memory_that_a_model_has_mapped_is_not_freed(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    model = Model(driver, peer, region)
    region.destroy()
    collect_all(bank)
    assert driver.live(0).allocations == 1
    model.write(7)  # on a GPU, this would be undefined if the memory was freed
    model.let_go()
    collect_all(bank)
    assert driver.live(0).allocations == 0


def test_an_event_lives_as_long_as_a_model_may_record_it(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    """A model that closes late uses nothing that its client has destroyed."""
    region = new_region()
    model = Model(driver, peer, region)
    region.destroy()
    bank.close()
    collect_all(bank)
    model.record()
    peer.synchronize_device(0)
    model.let_go()
    assert eventually(lambda: driver.live(0).events == 0)


def test_memory_that_a_model_has_mapped_counts_and_is_nobody_elses(
    driver: FakeDriver, peer: CudaRuntime, new_region: MakeRegion
) -> None:
    region = new_region(byte_size=LIMIT)
    model = Model(driver, peer, region)
    region.destroy()
    with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU 0 are in use"):
        new_region()
    model.let_go()
    new_region()


def test_a_model_that_keeps_one_slots_memory_keeps_no_other(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    regions = [new_region(), new_region((1,)), new_region()]
    model = Model(driver, peer, regions[1], device=1)
    for region in regions:
        region.destroy()
    collect_all(bank)
    assert driver.live(0).allocations == 1
    model.write(7)
    model.let_go()


def test_all_memory_of_a_slot_stays_while_a_model_has_some_of_it_mapped(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region((0, 1))
    model = Model(driver, peer, region, device=1)
    region.destroy()
    collect_all(bank)
    assert driver.live(0).allocations == 2
    model.let_go()


def test_giving_up_waits_for_nothing_as_finalizers_do_it(
    driver: FakeDriver, gpu: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region = new_region()
    asked = driver.count("cuCtxPushCurrent")
    with bank._lock, bank._starting, gpu.retired._lock:
        region.destroy()
    assert (driver.count("cuMemFree"), driver.count("cuCtxPushCurrent")) == (0, asked)
    collect_all(bank)
    assert driver.count("cuMemFree") == 1


# Closing


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("way", ["close", "abandon"])
def test_what_models_still_use_is_freed_when_they_let_go(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion, way: str, times: int
) -> None:
    region = new_region()
    model = Model(driver, peer, region)
    region.destroy()
    for _ in range(times):
        getattr(bank, way)()
    (collector,) = collectors()
    assert driver.live(0).allocations == 1
    model.let_go()
    collector.join(PATIENCE_S)
    assert not collectors()
    assert driver.live(0).allocations == 0


def test_a_bank_that_is_abandoned_asks_nothing_of_cuda_itself(
    driver: FakeDriver, bank: DeviceBank, new_region: MakeRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer abandons it, and CUDA may wait for a device that it frees memory of."""
    new_region().destroy()
    here = threading.get_ident()
    asked: list[int] = []
    collect = bank.cuda.collect

    def noted() -> bool:
        asked.append(threading.get_ident())
        return collect()

    monkeypatch.setattr(bank.cuda, "collect", noted)
    bank.abandon()
    assert eventually(lambda: driver.live().allocations == 0)
    assert asked
    assert here not in asked
    assert eventually(lambda: not collectors())


# What is kept for models


def test_what_a_region_keeps_lives_until_no_model_uses_it(
    driver: FakeDriver, peer: CudaRuntime, bank: DeviceBank, new_region: MakeRegion
) -> None:
    region, kept = new_region(), [Kept()]
    is_alive = kept[0].watch()
    region.lent.append(kept.pop())
    bank.take_care_of(region)
    collect_all(bank)
    assert is_alive()
    model = Model(driver, peer, region)
    region.destroy()
    collect_all(bank)
    assert is_alive()
    model.let_go()
    collect_all(bank)
    assert not is_alive()


def test_what_is_kept_while_something_is_in_use_is_let_go_of_then(bank: DeviceBank) -> None:
    in_use, kept = [True], [Kept()]
    is_alive = kept[0].watch()
    bank.keep_while(lambda: in_use[0], kept.pop())
    time.sleep(0.1)
    assert is_alive()
    in_use[0] = False
    assert eventually(lambda: not is_alive())
    assert eventually(lambda: not collectors())


def test_threads_that_have_something_kept_share_one_collector_and_all_is_let_go_of(bank: DeviceBank) -> None:
    in_use, alive = [True], []
    lock = threading.Lock()

    def keep() -> None:
        for _ in range(20):
            kept = Kept()
            with lock:
                alive.append(kept.watch())
            bank.keep_while(lambda: in_use[0], kept)

    for _ in range(3):
        in_use[0] = True
        threads = [threading.Thread(target=keep) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(collectors()) == 1
        in_use[0] = False
        assert eventually(lambda: not any(is_alive() for is_alive in alive))
        assert eventually(lambda: not collectors())


@pytest.mark.parametrize("is_destroyed_again", [False, True])
def test_an_interrupt_at_the_end_of_a_region_frees_nothing_that_a_model_has_mapped(
    driver: FakeDriver, gpu: CudaRuntime, peer: CudaRuntime, is_destroyed_again: bool
) -> None:
    class Interrupted(deque[Any]):
        def append(self, each: Any) -> None:
            each.close()
            raise KeyboardInterrupt

    bank = DeviceBank(CudaAccess(lambda: gpu), LIMIT)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    bank.provide(region, (0,), (SIZE,))
    model = Model(driver, peer, region)
    bank._given_up = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        region.destroy()
    bank._given_up = deque()
    if is_destroyed_again:
        region.destroy()
    del region
    gc.collect()
    bank.collect()
    assert driver.live(0).allocations == 1
    model.let_go()
    collect_all(bank)
    assert driver.live(0).allocations == (not is_destroyed_again)
    del bank


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
