"""Device memory of a client's slots: up to a budget, and neither freed nor given to others while models may write."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.client.errors import BudgetError, PoolExhaustedError
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.origin import Origin
from shm_backend_utils.client.paths.direct import DirectExchange
from shm_backend_utils.client.paths.opening import Opening
from shm_backend_utils.client.settings import CallSettings
from shm_backend_utils.client.steps import BlockingDriver
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.memory.cuda.events import Event, EventRecorder
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaMappings
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.call_layout import CallInput
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.results import NO_RESULTS
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import BYTES, fails_by, objects_of, runtime_that_gives_all_back
from tests.unit.fake_gpu_events import PATIENCE_S, unfinished_work

SHM = Path("/dev/shm")
SIZE = 4096
BYTE = BY_NAME["UINT8"]
LIMIT = 2 * SIZE
OUT_OF_MEMORY = "cudaErrorMemoryAllocation"

MakeRegion = Callable[..., SlotRegion]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
    assert objects_of(os.getpid()) == []


@pytest.fixture
def bank(cuda: FakeCuda) -> Iterator[DeviceBank]:
    """A bank from which two of the smallest regions can be provided on each device."""
    with contextlib.closing(DeviceBank(CudaAccess(lambda: cuda), LIMIT)) as bank:
        yield bank


@pytest.fixture
def new_region(bank: DeviceBank) -> Iterator[MakeRegion]:
    """Make a region with so much memory on these devices; it is destroyed in the end."""
    regions: list[SlotRegion] = []

    def make(devices: tuple[int, ...] = (0,), byte_size: int = SIZE) -> SlotRegion:
        regions.append(SlotRegion(100, 1, PAGE_SIZE, PRIVATE))
        bank.provide(regions[-1], devices, [byte_size] * len(devices))
        return regions[-1]

    yield make
    for region in regions:
        region.destroy()


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


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


# Providing


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
    access = CudaAccess(lambda: cuda)
    bank = DeviceBank(access, None)
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
    bank.provide(region, (), ())
    region.destroy()
    bank.collect()
    bank.close()
    assert not access.is_loaded


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


# Freeing


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


# Using a region again


SPEC = ModelSpec.from_config(
    {
        "name": "m",
        "input": [{"name": name, "data_type": "TYPE_UINT8", "dims": [-1], "optional": True} for name in "AB"],
    }
)


class Calls:
    """Takes memory for calls of a model on the direct path, as a client does."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.memory = ClientMemory(PoolOptions(max_bytes=2**20, max_device_bytes=LIMIT), CudaAccess(lambda: cuda))
        self._known = KnownModel(SPEC, head_room=1)
        self._opening = Opening(cast(Any, None), self.memory, cast(Any, None))
        self._driver = BlockingDriver(cast(Any, None))

    def open(self, timeout_s: float = PATIENCE_S, **devices: int) -> DirectExchange:
        """Return a call with some inputs of 100 bytes on these GPUs."""
        given = {name: CallInput(BYTE, (100,), 100, device) for name, device in devices.items()}
        settings = CallSettings("m", "", "auto", time.monotonic() + timeout_s, RequestOptions(), Origin.here("infer"))
        layout = self._known.lay_out(given, None)
        exchange = self._driver.run(self._opening.open(settings, self._known, "direct", layout, given, None))
        assert isinstance(exchange, DirectExchange)
        return exchange

    def close(self) -> None:
        self._driver._threads.shutdown()
        self.memory.end()


def pool_and_opening(cuda: FakeCuda) -> contextlib.closing[Calls]:
    return contextlib.closing(Calls(cuda))


def decoded_table(region: SlotRegion) -> Table:
    _, found = table.decode(bytes(region.slots[0].record.request), region.data_offset, region.byte_size)
    return found


def leave_events(exchange: DirectExchange, *events: Event) -> SlotRegion:
    """End a call's request as a model does whose GPU goes on; the call is over."""
    slot, region = exchange._slot, exchange._region
    slot.record.complete(slot.begin(table.encode(exchange._table)), results.encode((), events))
    exchange.close()
    return region


def test_a_region_is_used_again_when_the_models_gpu_has_finished(cuda: FakeCuda) -> None:
    model = FakeCuda()
    recorder = EventRecorder(model)
    done: list[str] = []
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)

        def call_next() -> None:
            again = calls.open(A=0)
            done.append("the next call" if again._region is region else "another region")
            again.close()

        with unfinished_work(model, done) as finish:
            region = leave_events(exchange, recorder.record(0))
            waiting = threading.Thread(target=call_next)
            waiting.start()
            finish.set()
            waiting.join(PATIENCE_S)
    assert done == ["work", "the next call"]


@pytest.mark.parametrize("written", [NO_RESULTS, results.encode(())], ids=["failed", "no outputs"])
def test_a_region_whose_models_have_left_nothing_to_wait_for_is_used_at_once(cuda: FakeCuda, written: bytes) -> None:
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot, region = exchange._slot, exchange._region
        slot.record.complete(slot.begin(table.encode(exchange._table)), written)
        exchange.close()
        again = calls.open(A=0)
        assert again._region is region
        again.close()
        del slot, region, exchange, again
    assert times(cuda, "synchronize_event") == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_without_an_answer_is_made_again_in_its_own_memory(cuda: FakeCuda, has_begun: bool) -> None:
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot = exchange._slot
        generation = slot.begin(table.encode(exchange._table))
        if has_begun:
            slot.record.started = generation
            slot.record.complete(generation, NO_RESULTS)
        slot.is_in_doubt = True
        request = exchange.send(PATIENCE_S)
        with pytest.raises(AttributeError, match="infer"):  # there is nobody to send it to
            next(request)
        assert slot.generation == generation + 2
        exchange.close()
        del slot, exchange


def test_a_region_whose_events_are_lost_is_not_used_again(cuda: FakeCuda) -> None:
    """Nobody will ever know when the model's GPU has finished there."""
    with pool_and_opening(cuda) as calls:
        region = leave_events(calls.open(A=0), Event("0" * 32, bytes(64)))
        again = calls.open(A=0)
        assert again._region is not region
        assert not (SHM / region.key).exists()
        again.close()
        del region, again


def test_calls_with_memory_on_other_gpus_get_other_regions(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        keys = set()
        for devices in ({"A": 0}, {"A": 1}, {"A": 0, "B": 1}, {"A": 0}):
            exchange = calls.open(**devices)
            keys.add(exchange._region.key)
            exchange.close()
        assert len(keys) == 3


def test_a_call_waits_for_device_memory_that_others_hold_and_no_longer_than_it_may(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        held = [calls.open(A=0), calls.open(A=0)]
        with pytest.raises(PoolExhaustedError, match="no device memory became free in time: .* on GPU 0 are in use"):
            calls.open(0.01, A=0)
        threading.Timer(0.05, held.pop().close).start()
        calls.open(A=0).close()
        held.pop().close()


def test_memory_on_one_gpu_that_no_call_uses_makes_room_for_another_call(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        both = [calls.open(A=0), calls.open(A=0)]
        for exchange in both:
            exchange.close()
        calls.open(A=0, B=1).close()


def test_regions_share_one_listener_so_that_an_event_is_opened_once(new_region: MakeRegion) -> None:
    regions = new_region((0, 1)), new_region()
    assert len({id(each.listener) for region in regions for each in region.device_memory.values()}) == 1


# Forked children


FORKING = """
import atexit, faulthandler, os, threading, traceback
from pathlib import Path
from shm_backend_utils.client.client_memory import ClientMemory
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

freeing, go_on = threading.Event(), threading.Event()

class SlowCuda(FakeCuda):
    def free(self, address):
        freeing.set()
        go_on.wait(20)
        super().free(address)

class Client:
    pass

cuda, client = SlowCuda(), Client()
memory = ClientMemory(PoolOptions(), CudaAccess(lambda: cuda))
memory.end_with(client)
regions = [SlotRegion(100, 1, 4096, PRIVATE) for _ in range(2)]
for region in regions:
    memory.bank.provide(region, [0], [100])

inodes = {region: (Path("/dev/shm") / region.key).stat().st_ino for region in regions}

def descriptors(region):
    places = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(place.stat().st_ino == inodes[region] for place in places if place.exists())

def in_child(work):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(5, exit=True)
        try:
            work()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    go_on.set()
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed"

try:
"""

END = """
finally:
    go_on.set()
    for region in regions:
        region.destroy()
    memory.end()
"""

USES = {
    "holds none of the regions that its parent has destroyed": """
        user = use(regions[0]._region.segment.fileno())
        regions[0].destroy()
        here = descriptors(regions[0])
        def work():
            there = descriptors(regions[0])
            assert there == here - 1, f"{there} of {here} descriptors are left"
        in_child(work)
        user.give_back()
    """,
    "ends although its parent was freeing memory": """
        for region in regions:
            region.destroy()
        collecting = threading.Thread(target=memory.bank.collect)
        collecting.start()
        freeing.wait(20)
        in_child(lambda: None)
        collecting.join()
    """,
    "frees nothing": """
        go_on.set()
        regions[0].destroy()
        in_child(memory.bank.close)
        assert cuda.live.allocations == 2
        memory.bank.collect()
        assert cuda.live.allocations == 1
    """,
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child(use: str) -> None:
    program = FORKING + textwrap.indent(textwrap.dedent(USES[use]), "    ") + END
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
