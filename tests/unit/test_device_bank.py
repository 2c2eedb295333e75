"""Device memory of a client's slots: up to a budget, and neither freed nor given to others while models may write."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shm_backend_utils.client.slot import Slot
from shm_backend_utils.protocol.descriptor import CudaRegionClaim, SystemRegionClaim

from shm_backend_utils.client.errors import BudgetError
from shm_backend_utils.errors import MachineError, PeerError
from shm_backend_utils.memory.cuda.bank import DeviceBank, ShortOfMemoryError, rounded_up
from shm_backend_utils.memory.cuda.events import Event, EventRecorder
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaMappings
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import BYTES, fails_by, objects_of, runtime_that_gives_all_back
from tests.unit.fake_gpu_events import PATIENCE_S, unfinished_work

SHM = Path("/dev/shm")
SIZE = 4096
LIMIT = 2 * SIZE
OUT_OF_MEMORY = "cudaErrorMemoryAllocation"

MakeSlot = Callable[..., Slot]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0
    assert objects_of(os.getpid()) == []


@pytest.fixture
def bank(cuda: FakeCuda) -> Iterator[DeviceBank]:
    """A bank from which two of the smallest slots can be provided on each device."""
    with contextlib.closing(DeviceBank(CudaAccess(lambda: cuda), LIMIT)) as bank:
        yield bank


@pytest.fixture
def new_slot(bank: DeviceBank) -> Iterator[MakeSlot]:
    """Make a slot with so much memory on these devices; it is destroyed in the end."""
    slots: list[Slot] = []

    def make(devices: tuple[int, ...] = (0,), byte_size: int = SIZE) -> Slot:
        slots.append(Slot(100, 1, PRIVATE))
        bank.provide(slots[-1], devices, [byte_size] * len(devices))
        return slots[-1]

    yield make
    for slot in slots:
        slot.destroy()


class Model:
    """What a model has of a slot: the device memory, mapped, and the lease that says so."""

    def __init__(self, slot: Slot, device: int = 0) -> None:
        allocation = slot.device_spaces[device].allocation
        fd = os.open(SHM / slot.key, os.O_RDWR)
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


def test_a_slot_has_what_it_needs_on_every_device(cuda: FakeCuda, new_slot: MakeSlot) -> None:
    slot = new_slot((0, 1))
    assert {device: space.byte_size for device, space in slot.device_spaces.items()} == {0: SIZE, 1: SIZE}
    assert [space.allocation.device for space in slot.device_spaces.values()] == [0, 1]
    assert cuda.live.allocations == 2


def test_what_a_slot_has_already_is_not_allocated_again(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot()
    first = slot.device_spaces[0]
    bank.provide(slot, (0, 1), (SIZE, SIZE))
    assert slot.device_spaces[0] is first
    assert times(cuda, "allocate") == 2


def test_a_descriptor_names_the_device_memory_and_the_slot_that_fences_it(new_slot: MakeSlot) -> None:
    slot = new_slot((0, 1))
    host, *on_devices = slot.claims(slot.turns[0], [1, 0])
    assert isinstance(host, SystemRegionClaim)
    assert host.key == slot.key
    allocations = [slot.device_spaces[device].allocation for device in (1, 0)]
    assert on_devices == [CudaRegionClaim(each.handle, SIZE, each.device_uuid, 0) for each in allocations]


def test_a_bank_that_provides_nothing_does_not_load_cuda(cuda: FakeCuda) -> None:
    access = CudaAccess(lambda: cuda)
    bank = DeviceBank(access, None)
    slot = Slot(100, 1, PRIVATE)
    bank.provide(slot, (), ())
    slot.destroy()
    bank.collect()
    bank.close()
    assert not access.is_loaded


def test_where_there_is_no_cuda_the_error_says_so_and_nothing_is_counted() -> None:
    def load() -> FakeCuda:
        raise MachineError("GPU memory needs CuPy, which is not installed")

    bank = DeviceBank(CudaAccess(load), SIZE)
    slot = Slot(100, 1, PRIVATE)
    for _ in range(2):
        with pytest.raises(MachineError, match="needs CuPy") as caught:
            bank.provide(slot, [0], [SIZE])
        assert not isinstance(caught.value, ShortOfMemoryError)
    slot.destroy()


# Budget


def test_each_device_gives_up_to_the_budget(bank: DeviceBank, new_slot: MakeSlot) -> None:
    for _ in range(2):
        new_slot((0, 1))
    for device in (0, 1):
        with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU {device} are in use"):
            new_slot((device,))


def test_what_does_not_fit_now_fits_when_a_slot_was_destroyed(new_slot: MakeSlot) -> None:
    first, _ = new_slot(), new_slot()
    with pytest.raises(ShortOfMemoryError):
        new_slot()
    first.destroy()
    new_slot()


def test_what_can_never_fit_is_refused_at_once_with_the_option_that_would_help(
    cuda: FakeCuda, new_slot: MakeSlot
) -> None:
    with pytest.raises(
        BudgetError,
        match=rf"needs {LIMIT + 1} bytes on GPU 0, but the pool may have {LIMIT}; raise PoolOptions.max_device_bytes",
    ):
        new_slot(byte_size=LIMIT + 1)
    assert times(cuda, "allocate") == 0


def test_the_whole_budget_may_be_one_slots(new_slot: MakeSlot) -> None:
    assert new_slot(byte_size=LIMIT).device_spaces[0].byte_size == LIMIT


def test_a_bank_without_a_budget_gives_what_the_device_has(cuda: FakeCuda) -> None:
    with contextlib.closing(DeviceBank(CudaAccess(lambda: cuda), None)) as bank:
        slot = Slot(100, 1, PRIVATE)
        bank.provide(slot, [0], [100 * SIZE])
        slot.destroy()


def test_memory_that_the_device_does_not_have_may_be_there_later(cuda: FakeCuda, new_slot: MakeSlot) -> None:
    cuda.fail_next("allocate", OUT_OF_MEMORY)
    with pytest.raises(ShortOfMemoryError, match=OUT_OF_MEMORY):
        new_slot(byte_size=LIMIT)
    new_slot(byte_size=LIMIT)  # the attempt is not counted


@pytest.mark.parametrize(("method", "name"), [("allocate", "cudaErrorNoDevice"), ("export", "cudaErrorNotSupported")])
def test_any_other_failure_is_told_as_it_is_and_leaves_nothing(
    cuda: FakeCuda, new_slot: MakeSlot, method: str, name: str
) -> None:
    cuda.fail_next(method, name)
    with fails_by(name):
        new_slot(byte_size=LIMIT)
    assert new_slot(byte_size=LIMIT).device_spaces[0].byte_size == LIMIT


def test_a_slot_for_which_one_device_has_no_room_keeps_what_the_other_gave(
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    in_the_way = new_slot((1,), LIMIT)
    slot = Slot(100, 1, PRIVATE)
    with pytest.raises(ShortOfMemoryError):
        bank.provide(slot, (0, 1), (SIZE, SIZE))
    in_the_way.destroy()
    bank.provide(slot, (0, 1), (SIZE, SIZE))
    assert times(cuda, "allocate") == 3
    slot.destroy()


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
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    slot = new_slot((0, 1))
    slot.destroy()
    bank.collect()
    assert cuda.live.allocations == 0
    assert times(cuda, "free") == 2


def test_memory_that_a_model_has_mapped_is_not_freed(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot()
    model = Model(slot)
    slot.destroy()
    bank.collect()
    assert cuda.live.allocations == 1
    model.write(7)  # on a GPU, this would be undefined if the memory was freed
    model.let_go()
    bank.collect()
    assert cuda.live.allocations == 0


def test_memory_that_a_model_has_mapped_counts_and_is_nobody_elses(bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot(byte_size=LIMIT)
    model = Model(slot)
    slot.destroy()
    with pytest.raises(ShortOfMemoryError, match=f"{LIMIT} of {LIMIT} bytes on GPU 0 are in use"):
        new_slot()
    model.let_go()
    new_slot()


def test_memory_that_several_models_have_mapped_is_freed_after_the_last(
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    slot = new_slot()
    models = [Model(slot), Model(slot)]
    slot.destroy()
    live = []
    for model in models:
        model.let_go()
        bank.collect()
        live.append(cuda.live.allocations)
    assert live == [1, 0]


def test_a_model_that_keeps_one_slots_memory_keeps_no_other(
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    slots = [new_slot(), new_slot((1,)), new_slot()]
    model = Model(slots[1], device=1)
    for slot in slots:
        slot.destroy()
    bank.collect()
    assert cuda.live.allocations == 1
    model.write(7)
    model.let_go()


def test_all_memory_of_a_slot_stays_while_a_model_has_some_of_it_mapped(
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    slot = new_slot((0, 1))
    model = Model(slot, device=1)
    slot.destroy()
    bank.collect()
    assert cuda.live.allocations == 2
    model.let_go()


def test_memory_is_freed_after_the_users_last_array(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot()
    array = slot.device_spaces[0].array_at(np.empty(0, np.uint8), 0, BYTES, (SIZE,))
    slot.destroy()
    bank.collect()
    assert array.get().size == SIZE
    assert cuda.live.allocations == 1
    del array
    assert cuda.live.allocations == 0


def test_burying_waits_for_nothing_as_finalizers_do_it(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot()
    with bank._lock:
        slot.destroy()
    assert times(cuda, "free") == 0
    bank.collect()
    assert times(cuda, "free") == 1


def test_a_slot_is_buried_once(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    slot = new_slot()
    slot.destroy()
    slot.destroy()
    bank.collect()
    assert times(cuda, "free") == 1


# Closing


def test_a_bank_that_is_closed_frees_what_nobody_uses(cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot) -> None:
    new_slot().destroy()
    bank.close()
    assert cuda.live.allocations == 0


def test_what_models_still_use_is_freed_after_the_bank_was_closed_when_they_let_go(
    cuda: FakeCuda, bank: DeviceBank, new_slot: MakeSlot
) -> None:
    slot = new_slot()
    model = Model(slot)
    slot.destroy()
    bank.close()
    (undertaker,) = [thread for thread in threading.enumerate() if thread.name == "shm device memory"]
    assert cuda.live.allocations == 1
    model.let_go()
    undertaker.join(PATIENCE_S)
    assert not undertaker.is_alive()
    assert cuda.live.allocations == 0


# Using a slot again


def results_with(*events: Event) -> bytes:
    listed = [[event.device_uuid, base64.b64encode(event.handle).decode()] for event in events]
    return json.dumps({"": listed}).encode()


def wait_for_models(slot: Slot) -> None:
    events = slot.events
    if events:
        slot.listener.wait(events)


def test_a_slot_is_used_again_when_the_models_gpu_has_finished(new_slot: MakeSlot) -> None:
    slot = new_slot()
    model = FakeCuda()
    recorder = EventRecorder(model)
    done: list[str] = []

    def call_next() -> None:
        wait_for_models(slot)
        done.append("the next call")

    with unfinished_work(model, done) as finish:
        slot.turns[0].record.complete(slot.turns[0].advance(), results_with(recorder.record(0)))
        waiting = threading.Thread(target=call_next)
        waiting.start()
        finish.set()
        waiting.join(PATIENCE_S)
    assert done == ["work", "the next call"]


@pytest.mark.parametrize("results", [b"", b"{}", b'{"Y":null}'])
def test_a_slot_whose_models_have_left_nothing_to_wait_for_is_used_at_once(
    cuda: FakeCuda, new_slot: MakeSlot, results: bytes
) -> None:
    slot = new_slot()
    wait_for_models(slot)
    slot.turns[0].record.complete(slot.turns[0].advance(), results)
    wait_for_models(slot)
    assert times(cuda, "synchronize_event") == 0


def test_an_event_for_a_slot_without_device_memory_is_the_peers_fault() -> None:
    slot = Slot(100, 1, PRIVATE)
    slot.turns[0].record.complete(slot.turns[0].advance(), results_with(Event("0" * 32, bytes(64))))
    with pytest.raises(PeerError, match="an event for a call without memory on a GPU"):
        wait_for_models(slot)
    slot.destroy()


def test_slots_share_one_listener_so_that_an_event_is_opened_once(new_slot: MakeSlot) -> None:
    assert (
        len({id(space.listener) for slot in (new_slot((0, 1)), new_slot()) for space in slot.device_spaces.values()})
        == 1
    )


# Forked children


FORKING = """
import atexit, faulthandler, os, threading, traceback
from pathlib import Path
from shm_backend_utils.client.slot import Slot
from shm_backend_utils.client.terms import Terms
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.locks import use
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
terms = Terms("127.0.0.1:1", 1.0, "auto", None, None, CudaAccess(lambda: cuda))
terms.memory.end_with(client)
slots = [Slot(100, 1, PRIVATE) for _ in range(2)]
for slot in slots:
    terms.memory.bank.provide(slot, [0], [100])

inodes = {slot: (Path("/dev/shm") / slot.key).stat().st_ino for slot in slots}

def descriptors(slot):
    places = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(place.stat().st_ino == inodes[slot] for place in places if place.exists())

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
    for slot in slots:
        slot.destroy()
    terms.memory.end()
"""

USES = {
    "holds none of the regions that its parent has destroyed": """
        user = use(slots[0]._region.segment.fileno())
        slots[0].destroy()
        here = descriptors(slots[0])
        def work():
            there = descriptors(slots[0])
            assert there == here - 1, f"{there} of {here} descriptors are left"
        in_child(work)
        user.give_back()
    """,
    "ends although its parent was freeing memory": """
        for slot in slots:
            slot.destroy()
        collecting = threading.Thread(target=terms.memory.bank.collect)
        collecting.start()
        freeing.wait(20)
        in_child(lambda: None)
        collecting.join()
    """,
    "frees nothing": """
        go_on.set()
        slots[0].destroy()
        in_child(terms.memory.bank.close)
        assert cuda.live.allocations == 2
        terms.memory.bank.collect()
        assert cuda.live.allocations == 1
    """,
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child(use: str) -> None:
    program = FORKING + textwrap.indent(textwrap.dedent(USES[use]), "    ") + END
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
