"""Pinned host memory: whole regions are registered with CUDA once, for as long as they are mapped; or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.memory import HostMemory, Pinning
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType
from tests.unit.claims_of import Resolved, slot_of
from tests.unit.gpu.fakes import DRIVER, MODEL, left_of, runtime_that_gives_all_back, that_nobody_loads, wait_until


class PinningCuda(CudaRuntime):
    """Notes what it pins, and looks whether what it unpins is still mapped, and not something else by now."""

    def __init__(self) -> None:
        super().__init__(DRIVER.bindings(MODEL))
        self.pins: list[tuple[int, int]] = []

    def pin(self, address: int, byte_size: int) -> None:
        super().pin(address, byte_size)
        self.pins.append((address, byte_size))

    def unpin(self, address: int) -> None:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        super().unpin(address)


@pytest.fixture
def cuda() -> Iterator[PinningCuda]:
    with runtime_that_gives_all_back():
        runtime = PinningCuda()
        yield runtime
        unpin(runtime)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def model(cuda: PinningCuda, warnings: list[str]) -> Iterator[Resolver]:
    model = pinning_model(CudaAccess(lambda: cuda), warnings)
    yield model
    model.close()  # before it is asked whether all was given back


def pinning_model(access: CudaAccess, warnings: list[str], limit: int | None = None) -> Resolver:
    return Resolver(Config(max_mapped_bytes=limit), access, Pinning(access, warnings.append))


@contextlib.contextmanager
def managed_regions(count: int) -> Iterator[list[ManagedRegion]]:
    regions = [ManagedRegion.create(PAGE_SIZE, slot_count=2) for _ in range(count)]
    yield regions
    for region in regions:
        region.segment.unlink()
        region.close()


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    with managed_regions(1) as regions:
        yield regions[0]


def mapped(model: Resolver, region: ManagedRegion, slot: int = 0) -> Resolved:
    found = slot_of(model, region, slot)
    return Resolved(found.region, found.memory)


def pinned(cuda: CudaRuntime) -> int:
    unpin(cuda)
    return left_of(MODEL).pinned


def unpin(cuda: CudaRuntime) -> None:
    wait_until(lambda: not cuda.retired.collect())


def place_of(found: Resolved) -> tuple[int, int]:
    memory = bytes_of(found)
    return memory.ctypes.data, memory.nbytes


def bytes_of(found: Resolved) -> npt.NDArray[np.uint8]:
    memory = found.mapped.memory
    assert isinstance(memory, HostMemory)
    return memory.bytes()


def attributes_of(found: Resolved) -> BufferAttributes:
    assert isinstance(found.memory, HostMemory)
    return BufferAttributes(found.memory.memory_type, 0, found.memory.byte_size)


def test_a_managed_region_is_pinned_once(cuda: PinningCuda, model: Resolver, region: ManagedRegion) -> None:
    first, *later = [mapped(model, region, slot) for slot in (0, 1, 0)]
    assert later == [first, first]
    assert cuda.pins == [place_of(first)]
    assert cuda.pins[0][1] == region.header.byte_size
    assert cuda.pins[0][0] % PAGE_SIZE == 0


def test_a_region_is_unpinned_after_its_use(cuda: PinningCuda, model: Resolver, region: ManagedRegion) -> None:
    use = mapped(model, region)
    model.registry.unregister_all()
    assert attributes_of(use).memory_type is MemoryType.CPU_PINNED
    assert pinned(cuda) == 1
    del use
    assert pinned(cuda) == 0


def test_a_region_without_room_is_not_pinned(cuda: PinningCuda, warnings: list[str], region: ManagedRegion) -> None:
    model = pinning_model(CudaAccess(lambda: cuda), warnings, limit=1)
    with pytest.raises(MachineError, match="SHM_MAX_MAPPED_BYTES"):
        mapped(model, region)
    assert pinned(cuda) == 0
    model.close()


def test_what_stays_pinned_is_unmapped_all_the_same(cuda: PinningCuda, model: Resolver, region: ManagedRegion) -> None:
    mapped(model, region)
    DRIVER.fail_next("cuMemHostUnregister", "CUDA_ERROR_UNKNOWN", process=MODEL)
    model.registry.unregister_all()
    unpin(cuda)
    assert Path("/proc/self/maps").read_text().count(f" {region.segment.identity[1]} ") == 1  # the client's
    ((address, _),) = cuda.pins
    CudaRuntime.unpin(cuda, address)  # CUDA still has it as pinned


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", "not that much memory left"),
        ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "pinned already"),
    ],
)
def test_unpinned_it_works(model: Resolver, warnings: list[str], region: ManagedRegion, name: str, reason: str) -> None:
    DRIVER.fail_next("cuMemHostRegister", name, process=MODEL)
    found = mapped(model, region)
    assert attributes_of(found) == BufferAttributes(MemoryType.CPU, 0, region.header.byte_size, None)
    bytes_of(found)[region.data_offset] = 42
    assert region.data()[0] == 42
    (warning,) = warnings
    assert warning.startswith("SHM_PIN_HOST_MEMORY: memory stays pageable: ")
    assert name in warning
    assert reason in warning
    assert region.segment.key not in warning


def test_what_cannot_be_pinned_is_warned_of_once(cuda: PinningCuda, model: Resolver, warnings: list[str]) -> None:
    with managed_regions(3) as regions:
        DRIVER.fail_next("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", times=2, process=MODEL)
        kinds = [attributes_of(mapped(model, region)).memory_type for region in regions]
        assert kinds == [MemoryType.CPU, MemoryType.CPU, MemoryType.CPU_PINNED]
        assert len(warnings) == 1
        model.registry.unregister_all()
        assert pinned(cuda) == 0


def test_without_a_gpu_regions_serve_as_they_are_and_one_warning_says_why(warnings: list[str]) -> None:
    def load() -> CudaRuntime:
        raise MachineError("GPU memory needs cuda-bindings")

    model = pinning_model(CudaAccess(load), warnings)
    with managed_regions(2) as regions:
        kinds = {attributes_of(mapped(model, region)).memory_type for region in regions}
        assert kinds == {MemoryType.CPU}
        assert warnings == ["SHM_PIN_HOST_MEMORY: memory stays pageable: GPU memory needs cuda-bindings"]
        model.close()


def test_without_pinning_cuda_is_not_loaded(cuda: PinningCuda, region: ManagedRegion) -> None:
    with that_nobody_loads(cuda) as access:
        model = Resolver(Config(), access)
        assert attributes_of(mapped(model, region)).memory_type is MemoryType.CPU
        model.close()
