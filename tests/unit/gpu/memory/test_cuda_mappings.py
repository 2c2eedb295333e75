"""Device memory: kept by its owner; opened once by those who map it, with leases that its owner sees."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping, CudaMappings, device_with
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.memory.locks import SharedLease, has_users, use
from shm_backend_utils.memory.managed import ManagedRegion
from tests.unit.gpu.fakes import (
    BLOCK,
    CLIENT,
    DRIVER,
    NOTHING,
    PATIENCE_S,
    collect_all,
    in_another_thread,
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
def test_what_is_refused_is_unmapped_before(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
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
