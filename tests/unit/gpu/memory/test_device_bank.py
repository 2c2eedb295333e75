"""Device memory of slots: up to a budget for each GPU, and freed when its slot is gone and no model has it mapped."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import BudgetError, MachineError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.descriptors import PRIVATE
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.gpu.fakes import BLOCK, DRIVER, PATIENCE_S, collect_all, fails_by, that_nobody_loads, wait_until
from tests.unit.side_by_side import side_by_side

LIMIT = 2 * BLOCK
OWNER = 0
GPU_BYTES = 4 * 2**30
"""What each GPU of the fake driver has."""


def collectors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shm device memory"]


def new_region() -> SlotRegion:
    return SlotRegion(100, 1, PAGE_SIZE, PRIVATE)


class Model:
    def __init__(self, runtime: CudaRuntime, region: SlotRegion, device: int) -> None:
        allocation = region.device_memory[device]
        fd = os.open(Path("/dev/shm") / region.key, os.O_RDWR)
        lease = use(fd)
        os.close(fd)
        self._runtime = runtime
        self.mapping: CudaMapping = CudaMappings(runtime).map(
            allocation.handle, allocation.byte_size, device, "region", lease
        )

    def write(self) -> None:
        DRIVER.memory(self.mapping.address, (BLOCK,), "u1")[:] = 7

    def let_go(self) -> None:
        self.mapping.close()
        collect_all(self._runtime)


class Slots:
    def __init__(self, gpu: CudaRuntime, peer: CudaRuntime) -> None:
        self.bank = DeviceBank(CudaAccess(lambda: gpu), LIMIT)
        self._peer = peer
        self._regions: list[SlotRegion] = []

    def region(self, devices: tuple[int, ...] = (0,), byte_size: int = BLOCK) -> SlotRegion:
        self._regions.append(new_region())
        self.bank.provide(self._regions[-1], devices, [byte_size] * len(devices))
        return self._regions[-1]

    def model(self, region: SlotRegion, device: int = 0) -> Model:
        return Model(self._peer, region, device)

    def collect(self) -> None:
        gc.collect()
        wait_until(lambda: not self.bank.collect() or bool(self.bank._given_up and not self.bank.cuda.has_retired))

    @property
    def allocations(self) -> int:
        return DRIVER.live(OWNER).allocations

    def close(self) -> None:
        for region in self._regions:
            region.destroy()
        self.bank.close()
        wait_until(lambda: not collectors())


@pytest.fixture
def slots(gpu: CudaRuntime, peer: CudaRuntime) -> Iterator[Slots]:
    with contextlib.closing(Slots(gpu, peer)) as slots:
        yield slots


def test_memory_that_a_model_has_mapped_counts_and_is_nobody_elses(slots: Slots) -> None:
    region = slots.region(byte_size=LIMIT)
    model = slots.model(region)
    region.destroy()
    with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU 0 are in use"):
        slots.region()
    model.let_go()
    slots.region()


def test_a_model_that_keeps_one_slots_memory_keeps_all_of_it_and_no_other(slots: Slots) -> None:
    regions = [slots.region(), slots.region((0, 1)), slots.region((1,))]
    model = slots.model(regions[1], device=1)
    for region in regions:
        region.destroy()
    slots.collect()
    assert slots.allocations == 2
    model.write()
    model.let_go()


def test_giving_up_waits_for_nothing_as_finalizers_do_it(slots: Slots, gpu: CudaRuntime) -> None:
    region, asked = slots.region(), DRIVER.count("cuCtxPushCurrent")
    with slots.bank._lock, slots.bank._starting, gpu.retired._lock:
        region.destroy()
    assert (DRIVER.count("cuMemFree"), DRIVER.count("cuCtxPushCurrent")) == (0, asked)
    slots.collect()
    assert DRIVER.count("cuMemFree") == 1


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("way", ["close", "abandon"])
def test_what_models_still_use_is_freed_when_they_let_go(slots: Slots, way: str, times: int) -> None:
    region = slots.region()
    model = slots.model(region)
    region.destroy()
    for _ in range(times):
        getattr(slots.bank, way)()
    (collector,) = collectors()
    assert slots.allocations == 1
    model.let_go()
    collector.join(PATIENCE_S)
    assert not collectors()
    assert slots.allocations == 0


def test_a_bank_that_is_abandoned_asks_nothing_of_cuda_itself(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer abandons it, and CUDA may wait for a device that it frees memory of."""
    slots.region().destroy()
    asked: list[int] = []
    runtime = slots.bank.cuda.runtime
    free = runtime.free

    def noted(address: int, device: int) -> None:
        asked.append(threading.get_ident())
        free(address, device)

    monkeypatch.setattr(runtime, "free", noted)
    slots.bank.abandon()
    wait_until(lambda: slots.allocations == 0)
    assert asked
    assert threading.get_ident() not in asked
    wait_until(lambda: not collectors())


# What is kept for models


class Kept:
    """Something that can be seen to be gone."""


def test_threads_that_have_something_kept_share_one_collector_and_all_is_let_go_of(slots: Slots) -> None:
    in_use, seen = [True], deque[weakref.ref[Kept]]()

    def keep() -> None:
        for _ in range(20):
            kept = Kept()
            seen.append(weakref.ref(kept))
            slots.bank.keep_while(lambda: in_use[0], kept)

    for _ in range(3):
        in_use[0] = True
        side_by_side(*[keep] * 4)
        time.sleep(0.1)
        assert (len(collectors()), all(each() for each in seen)) == (1, True)
        in_use[0] = False
        wait_until(lambda: not any(each() for each in seen))
        wait_until(lambda: not collectors())
        seen.clear()


def test_a_finalizer_that_waits_holds_up_neither_the_collector_nor_calls(slots: Slots, gpu: CudaRuntime) -> None:
    waits, go_on, polled = threading.Event(), threading.Event(), list[float]()

    class Waiting:
        def __del__(self) -> None:
            waits.set()
            go_on.wait(2 * PATIENCE_S)

    def is_awaited() -> bool:
        polled.append(time.monotonic())
        return len(polled) < 3

    assert slots.bank.cuda.runtime is gpu
    slots.bank.keep_while(lambda: False, Waiting())
    try:
        assert waits.wait(PATIENCE_S)
        slots.bank.keep_while(is_awaited, None)
        wait_until(lambda: len(polled) == 3)
        slots.region()
    finally:
        go_on.set()


@pytest.mark.parametrize("is_destroyed_again", [False, True])
def test_an_interrupt_frees_nothing_mapped(gpu: CudaRuntime, peer: CudaRuntime, is_destroyed_again: bool) -> None:
    class Interrupted(deque[Any]):
        def append(self, each: Any) -> None:
            each.close()
            raise KeyboardInterrupt

    slots = Slots(gpu, peer)
    region = new_region()
    slots.bank.provide(region, (0,), (BLOCK,))
    model = slots.model(region)
    slots.bank._given_up = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        region.destroy()
    slots.bank._given_up = deque()
    if is_destroyed_again:
        region.destroy()
    del region
    gc.collect()
    slots.bank.collect()
    assert slots.allocations == 1
    model.let_go()
    slots.collect()
    assert slots.allocations == (not is_destroyed_again)


# What is provided, and the budget


def test_each_device_gives_up_to_the_budget(slots: Slots) -> None:
    for _ in range(2):
        slots.region((0, 1), 1)  # CUDA gives whole blocks, however little is asked for
    for device in (0, 1):
        with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU {device} are in use"):
            slots.region((device,))


@pytest.mark.parametrize(
    ("limit", "byte_size", "text"),
    [
        (LIMIT, LIMIT + 1, f"needs {LIMIT + BLOCK} bytes on GPU 0, but the pool may have {LIMIT}; raise .*max_device_"),
        *((None, size, rf"on GPU 0, which has {GPU_BYTES}; send less at once") for size in (GPU_BYTES + 1, 2**80)),
    ],
)
def test_what_can_never_fit_is_refused_at_once(gpu: CudaRuntime, limit: int | None, byte_size: int, text: str) -> None:
    bank, region = DeviceBank(CudaAccess(lambda: gpu), limit), new_region()
    with pytest.raises(BudgetError, match=text):
        bank.provide(region, [0], [byte_size])
    assert DRIVER.count("cuMemAlloc") == 0
    region.destroy()
    assert not bank.collect()


def test_a_bank_that_provides_nothing_does_not_load_cuda(gpu: CudaRuntime) -> None:
    with that_nobody_loads(gpu) as access:
        bank, region = DeviceBank(access, None), new_region()
        bank.provide(region, (), ())
        region.destroy()
        bank.collect()
        bank.close()
        bank.abandon()


def test_where_there_is_no_cuda_the_error_says_so_and_nothing_is_counted() -> None:
    def load() -> CudaRuntime:
        raise MachineError("GPU memory needs NVIDIA's driver")

    bank, region = DeviceBank(CudaAccess(load), BLOCK), new_region()
    for _ in range(2):
        with pytest.raises(MachineError, match="needs NVIDIA's driver") as caught:
            bank.provide(region, [0], [BLOCK])
        assert not isinstance(caught.value, ShortOfMemoryError)
    region.destroy()
    bank.close()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemAlloc", "CUDA_ERROR_NO_DEVICE"),
        ("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
def test_what_fails_leaves_nothing_and_is_not_counted(slots: Slots, function: str, name: str) -> None:
    DRIVER.fail_next(function, name)
    if name == "CUDA_ERROR_OUT_OF_MEMORY":  # there may be some later
        with pytest.raises(ShortOfMemoryError, match=name):
            slots.region(byte_size=LIMIT)
    else:
        with fails_by(name):
            slots.region(byte_size=LIMIT)
    gc.collect()  # the error has had the frames, and what they hold
    assert slots.region(byte_size=LIMIT).device_memory[0].byte_size == LIMIT


def test_a_slot_for_which_one_device_has_no_room_keeps_what_the_other_gave(slots: Slots) -> None:
    in_the_way, region = slots.region((1,), LIMIT), slots.region(())
    with pytest.raises(ShortOfMemoryError):
        slots.bank.provide(region, (0, 1), (BLOCK, BLOCK))
    assert list(region.device_memory) == [0]
    in_the_way.destroy()
    slots.bank.provide(region, (0, 1), (BLOCK, BLOCK))
    assert DRIVER.count("cuMemAlloc") == 3


@given(st.integers(1, 2**50))
def test_a_size_is_rounded_up_by_an_eighth_or_to_whole_blocks(byte_size: int) -> None:
    rounded = rounded_up(byte_size)
    assert byte_size <= rounded < byte_size + max(BLOCK, byte_size / 8)
    assert rounded % BLOCK == 0
    assert rounded_up(rounded) == rounded
