"""Device memory is freed when its slot is gone and no model has it mapped; not before."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.device_bank.conftest import LIMIT, SIZE, MakeRegion, Model, collectors, eventually
from tests.unit.gpus import PATIENCE_S


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
