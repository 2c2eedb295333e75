"""GPU memory by descriptor: who gets it, as what, and when it is unmapped."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

from shm_backend_utils.errors import ClosedError, RegionGoneError, RegionRefusedError, StaleRequestError, TableError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.bank import DeviceBank, ShortOfMemoryError
from shm_backend_utils.gpu.memory.by_descriptor import DescriptorAllocation
from shm_backend_utils.gpu.memory.mappings import CudaMapping
from shm_backend_utils.gpu.runtime import CudaRuntime, PointerFacts
from shm_backend_utils.memory.descriptors import PRIVATE, Descriptor
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.handover.server import REGISTRY
from shm_backend_utils.memory.locks import SharedLease, _flock, has_users
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.gpu.fakes import (
    BLOCK,
    CLIENT,
    DRIVER,
    MODEL,
    NOTHING,
    collect_all,
    held_back,
    in_forked_child,
    stream_on,
    wait_until,
)

DEVICE = 1
FIELD = "regions[1]"
SIZE = 2 * BLOCK


class Shared:
    """Memory of one process, and another process that maps it; a region fences it."""

    def __init__(self, owner: CudaRuntime, peer: CudaRuntime) -> None:
        self.owner, self.peer = owner, peer
        made = DescriptorAllocation.make(owner, SIZE, DEVICE, PRIVATE)
        assert made is not None
        self.allocation = made
        self.region = ManagedRegion.create(1, kind=RegionKind.SEALED)
        self._fetcher = Fetcher(1.0)

    def map(self, **changes: Any) -> CudaMapping:
        claim = replace(self.allocation.claim, **changes)
        cuda = CudaAccess(lambda: self.peer)
        return policy.open_cuda_descriptor(claim, self.region, Config(), cuda, self._fetcher, FIELD)

    def refusal(self, **changes: Any) -> str:
        with pytest.raises((RegionRefusedError, RegionGoneError, TableError)) as caught:
            self.map(**changes)
        assert self.allocation.claim.token not in str(caught.value)
        assert (DRIVER.live(CLIENT), self.is_in_use) == (NOTHING, False)  # though the error has the frames
        return str(caught.value)

    @property
    def is_in_use(self) -> bool:
        return has_users(self.region.segment.fileno())

    def collect(self) -> None:
        collect_all(self.owner)
        collect_all(self.peer)

    def close(self) -> None:
        gc.collect()
        self.allocation.free()
        self.collect()
        self.region.segment.unlink()
        self.region.close()


@pytest.fixture
def shared(gpu: CudaRuntime, peer: CudaRuntime) -> Iterator[Shared]:
    before = descriptors()
    shared = Shared(gpu, peer)
    yield shared
    shared.close()
    wait_until(lambda: descriptors() <= before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def numbers(at: CudaMapping | DescriptorAllocation) -> Any:
    return DRIVER.memory(at.address, (SIZE,), "u1")


# Shared


def test_memory_outlives_its_owner(shared: Shared) -> None:
    mapping = shared.map()
    numbers(shared.allocation)[:] = 7
    shared.allocation.free()
    with pytest.raises(ClosedError, match="this device memory is closed"):
        shared.allocation.keeper  # noqa: B018
    collect_all(shared.owner)
    assert DRIVER.live(MODEL) == NOTHING
    assert (numbers(mapping) == 7).all()
    assert (mapping.device, mapping.handle, shared.is_in_use) == (DEVICE, None, True)
    with pytest.raises(RegionGoneError, match="no longer handed over"):
        shared.map()
    mapping.close()
    shared.collect()
    assert (DRIVER.live(CLIENT), shared.is_in_use) == (NOTHING, False)


def test_a_process_maps_its_own_memory(gpu: CudaRuntime) -> None:
    shared = Shared(gpu, gpu)
    mapping = shared.map()
    numbers(mapping)[:] = 3
    assert (numbers(shared.allocation) == 3).all()
    mapping.close()
    shared.close()


def test_a_forked_child_frees_nothing(shared: Shared) -> None:
    mapping = shared.map()

    def drop() -> None:
        mapping.close()
        shared.allocation.free()
        gc.collect()

    in_forked_child(drop)
    assert shared.is_in_use
    assert numbers(mapping).size == SIZE
    shared.map().close()
    mapping.close()


def test_a_key_alone_does_not_find_the_mapping_of_another_client(shared: Shared) -> None:
    mapping, same, claim = shared.map(), shared.map(), shared.allocation.claim
    key, token = parse_sealed_key(claim.key), secrets.token_bytes(16)
    assert key is not None
    shared.allocation.free()
    other = DescriptorAllocation.make(shared.owner, SIZE, DEVICE, PRIVATE)
    assert other is not None
    assert other._owned is not None
    assert other._owned._descriptor is not None
    REGISTRY.offer(key.number, token, PRIVATE, other._owned._descriptor.duplicate)
    theirs = shared.map(token=token.hex())
    assert mapping.identity == same.identity != theirs.identity
    REGISTRY.withdraw(key.number)
    for each in (mapping, same, theirs):
        each.close()
    other.free()


# Unmapped


@pytest.mark.parametrize("side", ["owner", "peer"])
def test_memory_is_unmapped_when_the_device_has_finished(shared: Shared, side: Literal["owner", "peer"]) -> None:
    process, runtime = (MODEL, shared.owner) if side == "owner" else (CLIENT, shared.peer)
    mapping = shared.map()
    with stream_on(runtime, DEVICE) as stream, held_back(stream, process) as finish:
        shared.allocation.free() if side == "owner" else mapping.close()
        runtime.retired.collect_soon()
        time.sleep(0.05)
        assert (runtime.retired.is_waiting, DRIVER.count("cuMemUnmap", process)) == (True, 0)
        assert shared.is_in_use
        finish.set()
        collect_all(runtime)
    assert DRIVER.count("cuMemUnmap", process) == 1
    mapping.close()


def test_on_a_full_gpu_memory_is_unmapped_when_the_device_has_finished_and_no_capture_is_known(shared: Shared) -> None:
    mapping = shared.map()
    DRIVER.fail_next("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 9, CLIENT)
    DRIVER.fail_next("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 1, CLIENT)
    with stream_on(shared.peer, DEVICE) as stream, held_back(stream, CLIENT) as finish:
        mapping.close()
        assert shared.peer.retired.collect()
        shared.peer.retired.collect_soon()
        wait_until(lambda: DRIVER.count("cuCtxSynchronize", CLIENT) == 2)
        assert (shared.is_in_use, DRIVER.count("cuMemUnmap", CLIENT)) == (True, 0)
        finish.set()
        collect_all(shared.peer)
    assert (DRIVER.live(CLIENT), shared.is_in_use) == (NOTHING, False)


def test_memory_that_cannot_be_unmapped_keeps_its_lease(shared: Shared) -> None:
    mapping = shared.map()
    lease: SharedLease = mapping.keeper._lease  # type: ignore[attr-defined]
    DRIVER.fail_next("cuMemUnmap", "CUDA_ERROR_UNKNOWN", 1, CLIENT)
    mapping.close()
    collect_all(shared.peer)
    assert shared.is_in_use
    lease.give_back()
    shared.peer.unmap(mapping.address, SIZE, DEVICE)


# Refused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (lambda _: {"byte_size": BLOCK}, rf"regions\[1\].byte_size refused: it is not {BLOCK} bytes"),
        (lambda _: {"byte_size": SIZE + BLOCK}, r"regions\[1\].byte_size refused: .*; claim the whole allocation"),
        (lambda _: {"byte_size": SIZE - 1}, r"regions\[1\] refused"),
        (lambda each: {"device_uuid": each.owner.device_uuid(0)}, r"regions\[1\] refused: it is on GPU 1, but"),
        (lambda _: {"device_uuid": "ab" * 16}, r"regions\[1\] refused: it is on a GPU, .* does not see"),
        (lambda _: {"token": secrets.token_hex(16)}, r"regions\[1\] is no longer handed over"),
        (lambda _: {"key": f"shmbu-fd-{'0' * 32}-1"}, r"regions\[1\] is not handed over on the server's"),
        (lambda _: {"key": "shmbu-1-2"}, r"regions\[1\].name: found the key of a region in /dev"),
    ],
)
def test_a_claim_that_lies_is_refused(shared: Shared, changes: Callable[[Shared], dict[str, Any]], text: str) -> None:
    assert re.match(text, shared.refusal(**changes(shared)))
    assert shared.map().byte_size == SIZE


@pytest.mark.parametrize(
    "opened",
    [(os.memfd_create, "shmbu", os.MFD_CLOEXEC), (os.open, "/dev/null", os.O_RDWR), (os.open, "/", os.O_RDONLY)],
)
def test_a_descriptor_of_anything_else_is_refused(shared: Shared, opened: tuple[Any, ...]) -> None:
    number, token = next(REGISTRY.numbers), secrets.token_bytes(16)
    key = str(REGISTRY.offer(number, token, PRIVATE, lambda: Descriptor(*opened)))
    said = shared.refusal(key=key, token=token.hex())
    REGISTRY.withdraw(number)
    assert said.startswith("regions[1] refused: the descriptor that its client handed over is not GPU memory: ")
    assert key not in said


def test_memory_of_the_host_is_refused(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.peer, "pointer", lambda _: PointerFacts("pinned", DEVICE))
    assert shared.refusal() == "regions[1] refused: it is pinned memory, but claims to be on GPU 1"


def test_memory_is_refused_when_its_client_locks_the_lease_of_its_users_or_removes_its_region(shared: Shared) -> None:
    own = Descriptor(os.open, f"/proc/self/fd/{shared.region.segment.fileno()}", os.O_RDWR)
    with contextlib.closing(own) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, 1))
        with pytest.raises(StaleRequestError, match="another process has locked this memory"):
            shared.map()
    assert DRIVER.live(CLIENT) == NOTHING
    shared.region.segment.unlink()
    assert shared.refusal() == "regions[1] was removed by its owner"


@pytest.mark.parametrize("function", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuPointerGetAttributes"])
def test_what_fails_leaves_nothing_mapped(shared: Shared, function: str) -> None:
    DRIVER.fail_next(function, "CUDA_ERROR_OUT_OF_MEMORY", 1, CLIENT)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in shared.refusal()


# Provided


@pytest.fixture
def bank(gpu: CudaRuntime) -> Iterator[DeviceBank]:
    bank = DeviceBank(CudaAccess(lambda: gpu), SIZE)
    yield bank
    gc.collect()
    wait_until(lambda: not bank.collect())


def provided(bank: DeviceBank, kind: RegionKind) -> type[Any]:
    region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE, kind=kind)
    try:
        bank.provide(region, [DEVICE], [SIZE])
        return type(region.device_memory[DEVICE])
    finally:
        region.destroy()


@pytest.mark.parametrize("lacks", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemExportToShareableHandle"])
def test_where_the_device_cannot_all_memory_is_by_cuda_ipc(bank: DeviceBank, lacks: str) -> None:
    """Although its attributes promise it."""
    DRIVER.fail_next(lacks, "CUDA_ERROR_NOT_PERMITTED")
    assert provided(bank, RegionKind.SEALED) is CudaAllocation


def test_memory_that_is_short_is_not_counted(bank: DeviceBank) -> None:
    for function in ("cuMemCreate", "cuMemMap"):
        DRIVER.fail_next(function, "CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(ShortOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            provided(bank, RegionKind.SEALED)
    gc.collect()
    assert provided(bank, RegionKind.SEALED) is DescriptorAllocation
