"""Device memory, opened once by those who map it, with leases; and slot records that streams use, registered once."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings, device_with
from shm_backend_utils.gpu.memory.pinned import PinnedRecords
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import SharedLease, has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.gpu.fakes import (
    BLOCK,
    CLIENT,
    DRIVER,
    MODEL,
    NOTHING,
    PATIENCE_S,
    collect_all,
    held_back,
    in_another_thread,
    in_forked_child,
    stream_on,
)

DEVICE = 1
FIELD = "regions[1]"


class Shared:
    def __init__(self, gpu: CudaRuntime, peer: CudaRuntime) -> None:
        self.gpu, self.peer = gpu, peer
        self.allocation = CudaAllocation(gpu, BLOCK, DEVICE)
        self.mappings = CudaMappings(peer)
        self._region = ManagedRegion.create(1)

    def lease(self) -> SharedLease:
        return use(self._region.segment.fileno())

    @property
    def is_in_use(self) -> bool:
        return has_users(self._region.segment.fileno())

    def map(self, lease: SharedLease | None = None, byte_size: int = BLOCK) -> CudaMapping:
        return self.mappings.map(self.allocation.handle, byte_size, DEVICE, FIELD, lease)

    def collect(self) -> None:
        collect_all(self.peer)

    def close(self) -> None:
        self.collect()
        self.allocation.free()
        self._region.segment.unlink()
        self._region.close()


@pytest.fixture
def shared(gpu: CudaRuntime, peer: CudaRuntime) -> Iterator[Shared]:
    shared = Shared(gpu, peer)
    yield shared
    shared.close()


def reason_against(mappings: CudaMappings, handle: bytes, byte_size: int = BLOCK, device: int = DEVICE) -> str:
    with pytest.raises(RegionRefusedError, match=r"^regions\[1\] refused: ") as caught:
        mappings.map(handle, byte_size, device, FIELD)
    assert caught.value.field == FIELD
    assert handle.hex() not in str(caught.value) or not handle
    reason = caught.value.reason
    del caught  # it has the frames, and what they hold
    gc.collect()
    return reason


# Allocated


def test_memory_is_freed_once_when_the_last_one_that_keeps_it_is_gone(gpu: CudaRuntime) -> None:
    allocation = CudaAllocation(gpu, BLOCK, DEVICE)
    freed, kept = DRIVER.count("cuMemFree"), [allocation.keeper]
    allocation.free()
    allocation.free()
    with pytest.raises(ClosedError, match="this device memory is closed"):
        allocation.keeper  # noqa: B018
    collect_all(gpu)
    assert DRIVER.live().allocations == 1
    in_another_thread(kept.clear)
    collect_all(gpu)
    assert (DRIVER.live(), DRIVER.count("cuMemFree") - freed) == (NOTHING, 1)


def test_threads_that_map_at_once_open_once(shared: Shared) -> None:
    threads = 4
    arrived = threading.Barrier(threads)
    opened = DRIVER.count("cuIpcOpenMemHandle", CLIENT)

    def map_it(_: int) -> CudaMapping:
        arrived.wait()
        return shared.map()

    for _ in range(25):
        with ThreadPoolExecutor(threads) as pool:
            made = list(pool.map(map_it, range(threads)))
        assert len({mapping.address for mapping in made}) == 1
        made.clear()
        shared.collect()
        assert DRIVER.live(CLIENT) == NOTHING
    assert DRIVER.count("cuIpcOpenMemHandle", CLIENT) - opened == 25


def test_threads_that_map_and_let_go_leave_nothing(shared: Shared) -> None:
    def map_and_let_go(number: int) -> None:
        for _ in range(50):
            mapping = shared.map()
            assert DRIVER.live(CLIENT).opened == 1  # CUDA refuses to open a handle twice
            if number % 2:
                mapping.close_unused()
            mapping.close()
            shared.peer.retired.collect()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(map_and_let_go, range(4)))
    shared.collect()
    assert DRIVER.live(CLIENT) == NOTHING


@pytest.mark.parametrize("function", ["open", "close"])
def test_only_users_of_the_same_memory_wait_until_cuda_has_opened_or_closed_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """cuIpcCloseMemHandle waits for the whole device."""
    other, mapping = CudaAllocation(shared.gpu, BLOCK, DEVICE), shared.map()
    begin: Callable[[], Any] = mapping.close_unused
    if function == "open":
        mapping.close_unused()
        begin = shared.map
    is_slow, has_begun, is_idle = itertools.chain([True], itertools.repeat(False)), threading.Event(), threading.Event()
    call = getattr(shared.peer, function)

    def when_idle(*arguments: Any) -> Any:
        if next(is_slow):
            has_begun.set()
            assert is_idle.wait(PATIENCE_S)
        return call(*arguments)

    monkeypatch.setattr(shared.peer, function, when_idle)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(begin)
        assert has_begun.wait(PATIENCE_S)
        same = pool.submit(shared.map)
        shared.mappings.map(other.handle, BLOCK, DEVICE, FIELD).close_unused()
        assert [first.done(), same.done()] == [False, False]
        is_idle.set()
        first.result()
        assert same.result().address
    assert DRIVER.live(CLIENT).opened == 1


OWNER = f"""
import sys
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

allocation = CudaAllocation(FakeDriver.load().runtime(), {BLOCK}, {DEVICE})
print(allocation.handle.hex(), allocation.device_uuid, flush=True)
sys.stdin.read()
"""


def test_memory_of_a_killed_process_stays_while_it_is_mapped_and_is_refused_then(shared: Shared) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        handle, uuid = owner.stdout.readline().split()
        device = device_with(shared.peer, uuid, FIELD)
        mapping = shared.mappings.map(bytes.fromhex(handle), BLOCK, device, FIELD)
        owner.kill()
    assert DRIVER.memory(mapping.address, (BLOCK,), "u1").size == BLOCK
    mapping.close()
    shared.collect()
    assert "or is dead" in reason_against(shared.mappings, bytes.fromhex(handle))


# Leases


def test_each_use_of_memory_that_is_mapped_already_has_a_lease_of_its_own(shared: Shared) -> None:
    first, second = (shared.map(shared.lease()) for _ in range(2))
    first.close()
    shared.collect()
    assert shared.is_in_use
    second.close()
    shared.collect()
    assert not shared.is_in_use


# Refused: each cause has a text of its own, which says what to do


@pytest.mark.parametrize("length", [0, HANDLE_LENGTH - 1, HANDLE_LENGTH + 1])
def test_a_handle_of_another_length_is_refused(shared: Shared, length: int) -> None:
    opened = DRIVER.count("cuIpcOpenMemHandle", CLIENT)
    assert reason_against(shared.mappings, b"\1" * length) == f"its handle has {length} bytes; expected {HANDLE_LENGTH}"
    assert DRIVER.count("cuIpcOpenMemHandle", CLIENT) == opened


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["more than was allocated", "interrupted"])
def test_what_is_refused_is_unmapped(shared: Shared, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool) -> None:
    text = rf"^regions\[1\] refused: it claims {BLOCK + 1} bytes of .* {BLOCK}$"
    if is_interrupted:
        text = "^$"
        monkeypatch.setattr(CudaMapping, "check", interrupted)
    with pytest.raises((RegionRefusedError, KeyboardInterrupt), match=text) as caught:  # which keeps the frames
        shared.map(shared.lease(), BLOCK + 1)
    assert DRIVER.live(CLIENT) == NOTHING
    assert not shared.is_in_use
    del caught


def test_what_lies_before_the_memory_cannot_be_claimed(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = shared.peer.extent

    def of_a_larger_block(address: int, device: int) -> tuple[int, int]:
        begin, byte_size = extent(address, device)
        return begin - 512, byte_size + 512

    monkeypatch.setattr(shared.peer, "extent", of_a_larger_block)
    assert shared.map(byte_size=BLOCK - 1).byte_size == BLOCK  # another claim may be of more
    assert reason_against(shared.mappings, shared.allocation.handle, BLOCK + 1).endswith(f"allocation of {BLOCK}")


def test_memory_of_another_gpu_than_it_is_said_is_refused(shared: Shared) -> None:
    reason = reason_against(shared.mappings, shared.allocation.handle, device=0)
    assert reason == "it is on GPU 1, but claims to be on GPU 0"
    assert DRIVER.live(CLIENT) == NOTHING


def test_freed_memory_is_refused(shared: Shared) -> None:
    allocation = CudaAllocation(shared.gpu, BLOCK, DEVICE)
    allocation.free()
    collect_all(shared.gpu)
    reason = reason_against(shared.mappings, allocation.handle)
    assert "CUDA_ERROR_INVALID_HANDLE: the handle is not valid here: its owner has freed the memory" in reason
    assert "--ipc=host --pid=host" in reason


def test_memory_of_the_same_process_or_of_one_that_seems_to_be_it_is_refused(shared: Shared) -> None:
    """In another PID namespace a process may have the same id: CUDA takes it for itself."""
    own = reason_against(CudaMappings(shared.gpu), shared.allocation.handle)
    DRIVER.namespace(0, "a container", 7)
    DRIVER.namespace(1, "another container", 7)
    try:
        other = CudaAllocation(shared.gpu, BLOCK, DEVICE)
        assert reason_against(shared.mappings, other.handle) == own
    finally:
        DRIVER.namespace(0, "", 0)
        DRIVER.namespace(1, "", 0)
    assert "CUDA_ERROR_INVALID_CONTEXT: the handle was exported by this very process, or by a process with" in own


# Slot records that streams use

SLOTS = 3


@pytest.fixture
def three_slots() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(1, SLOTS)
    yield region
    region.segment.unlink()
    region.close()


def pinned() -> int:
    return DRIVER.live(MODEL).pinned


def write(gpu: CudaRuntime, region: ManagedRegion, slot: int, value: int, device: int) -> None:
    address = PinnedRecords.of(gpu, region).completed(slot, device)
    assert address is not None
    with stream_on(gpu, device) as stream, gpu.on(device):
        gpu.write_word(address, value, stream)


def test_streams_of_every_gpu_write_completed_of_every_slot(gpu: CudaRuntime, three_slots: ManagedRegion) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: PinnedRecords.of(gpu, three_slots).completed(0, 0), range(40)))
    assert (len(set(found)), pinned()) == (1, 1)
    before = DRIVER.count("cuMemHostRegister")
    for slot in range(SLOTS):
        for device in range(2):
            write(gpu, three_slots, slot, 10 * slot + device, device)
            assert three_slots.record(slot).completed == 10 * slot + device
    assert [three_slots.record(slot).started for slot in range(SLOTS)] == [0] * SLOTS
    assert (DRIVER.count("cuMemHostRegister"), pinned()) == (before + 1, 1)  # the second GPU finds it registered


def test_memory_that_somebody_else_has_registered_stays_so(gpu: CudaRuntime, three_slots: ManagedRegion) -> None:
    whole = three_slots.bytes()
    gpu.pin(whole.ctypes.data, whole.nbytes)
    write(gpu, three_slots, 0, 7, 0)
    three_slots.close()
    collect_all(gpu)
    assert pinned() == 1
    gpu.unpin(whole.ctypes.data)


def test_an_interrupt_leaves_no_registration(gpu: CudaRuntime, three_slots: ManagedRegion, monkeypatch: Any) -> None:
    def pin(address: int, byte_size: int) -> None:
        CudaRuntime.pin(gpu, address, byte_size)
        raise KeyboardInterrupt

    records = PinnedRecords.of(gpu, three_slots)
    monkeypatch.setattr(gpu, "pin", pin)
    with pytest.raises(KeyboardInterrupt):
        records.completed(0, 0)
    del records
    three_slots.close()
    gc.collect()
    collect_all(gpu)
    assert pinned() == 0


def test_records_of_a_closed_region_are_half_made(gpu: CudaRuntime, three_slots: ManagedRegion) -> None:
    three_slots.close()
    with pytest.raises(ClosedError):
        PinnedRecords.of(gpu, three_slots)
    gc.collect()  # its finalizer says nothing


@pytest.mark.parametrize("way", ["grow", "close"])
def test_a_mapping_that_ends_is_unregistered(gpu: CudaRuntime, three_slots: ManagedRegion, way: str) -> None:
    address = PinnedRecords.of(gpu, three_slots).completed(0, 1)
    assert address is not None
    kept = three_slots.bytes()
    with stream_on(gpu, 1) as stream:
        with held_back(stream):
            with gpu.on(1):
                gpu.write_word(address, 5, stream)
            three_slots.grow(2**20) if way == "grow" else three_slots.close()
            gc.collect()
            gpu.retired.collect_soon()
            time.sleep(0.05)
            assert (gpu.retired.is_waiting, pinned()) == (True, 1)
        gpu.synchronize_stream(stream, 1)
    collect_all(gpu)
    assert pinned() == 0
    assert np.count_nonzero(kept == 5) >= 1
    if way == "grow":
        write(gpu, three_slots, 0, 6, 1)
        assert three_slots.record(0).completed == 6


def test_a_forked_child_unregisters_nothing(gpu: CudaRuntime, three_slots: ManagedRegion) -> None:
    write(gpu, three_slots, 0, 7, 0)

    def let_go() -> None:
        three_slots.close()
        gc.collect()
        assert not gpu.retired.is_waiting

    in_forked_child(let_go)
    write(gpu, three_slots, 0, 8, 0)
    assert three_slots.record(0).completed == 8
