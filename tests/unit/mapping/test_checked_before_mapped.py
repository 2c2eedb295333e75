"""What a file is, is known before it is mapped: whose, writable by whom, with memory; then regions may be pinned."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory import shared_file
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.mapping.memory import HostMemory, Pinning
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType
from tests.unit.claims_of import Resolved, slot_of
from tests.unit.gpu.fakes import DRIVER, MODEL, left_of, runtime_that_gives_all_back, that_nobody_loads, wait_until
from tests.unit.mapping.files import NOBODY, TOKEN, managed_file, new_key

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
FIELD = "regions[1]"

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

Opener = Callable[[Path, Config], Any]


def open_managed(path: Path, config: Config) -> Any:
    return policy.open_managed(path.name, TOKEN.hex(), config, Fetcher(1.0), FIELD)


def any_size(file: SharedFile) -> None:
    """Let every file be mapped."""


def open_registered(path: Path, config: Config) -> Any:
    return policy.open_registered(Registration(f"/{path.name}", 0, SIZE), config, FIELD, any_size)


BOTH_KINDS = pytest.mark.parametrize("opener", [open_managed, open_registered], ids=["managed", "registered"])


@pytest.fixture
def path() -> Iterator[Path]:
    """A managed region that has its space, under a key that may be registered as well."""
    path = managed_file(new_key(), SIZE)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


@only_root
@BOTH_KINDS
def test_a_file_of_a_stranger_is_not_even_touched(opener: Opener, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(path, NOBODY, -1)

    def touched(*_: object) -> None:
        raise AssertionError("a stranger's file was touched")

    for place in (f"{mmap.__name__}.mmap", "os.pread", "os.read", "os.posix_fallocate"):
        monkeypatch.setattr(place, touched)
    with pytest.raises(RegionRefusedError, match=f"it belongs to user {NOBODY}, whom"):
        opener(path, Config())


TOGGLER = """
import os, sys, time
os.setuid(int(sys.argv[3]))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
size = int(sys.argv[2])
page = sys.stdin.buffer.read()
print("ready", flush=True)
while True:
    os.pwrite(fd, page, 0)
    os.ftruncate(fd, size)
    os.ftruncate(fd, 0)
"""

OPENER = """
import contextlib, sys
from pathlib import Path
from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.model.config import Config
from tests.unit.mapping import test_checked_before_mapped as test
for opener in (test.open_managed, test.open_registered):
    for _ in range(5_000):
        with contextlib.suppress(RegionRefusedError):
            opener(Path(sys.argv[1]), Config())
            sys.exit("it was opened")
"""


@only_root
def test_a_user_who_is_not_allowed_cannot_kill_the_model_by_truncating_as_it_opens(path: Path) -> None:
    header = path.read_bytes()[:PAGE]
    path.unlink()
    arguments = [sys.executable, "-c", TOGGLER, str(path), str(SIZE), str(NOBODY)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as toggler:
        try:
            assert toggler.stdin is not None
            assert toggler.stdout is not None
            toggler.stdin.write(header)
            toggler.stdin.close()
            assert toggler.stdout.readline() == b"ready\n"
            done = subprocess.run([sys.executable, "-c", OPENER, str(path)], check=False)
        finally:
            toggler.kill()
    assert done.returncode == 0


# Mode


@BOTH_KINDS
def test_a_file_that_everybody_may_write_to_is_refused_unless_everybody_is_allowed(opener: Opener, path: Path) -> None:
    for mode in (0o602, 0o622, 0o666, 0o777):
        path.chmod(mode)
        refusal = f"its mode 0{mode:o} lets every user write to it; expected 0600, or"
        with pytest.raises(RegionRefusedError, match=refusal):
            opener(path, Config())
        opener(path, Config(allowed_uids=None)).close()
    for mode in (0o600, 0o644, 0o660, 0o664):
        path.chmod(mode)
        opener(path, Config()).close()


# Space


def test_a_managed_region_with_holes_is_refused() -> None:
    path = managed_file(new_key(), SIZE)
    try:
        with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} of its {SIZE} bytes, and holes; allocate"):
            open_managed(path, Config())
    finally:
        path.unlink()


def test_a_managed_region_is_mapped_as_far_as_its_header_says(path: Path) -> None:
    os.truncate(path, 2**50)
    region = open_managed(path, Config())
    assert region.segment.byte_size == SIZE
    region.close()


def test_of_a_registered_file_with_holes_the_registered_part_gets_memory(path: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, 10 * SIZE)
    for offset, byte_size in ((SIZE, 2 * SIZE), (PAGE, 0)):
        policy.open_registered(Registration(f"/{path.name}", offset, byte_size), Config(), FIELD, any_size).close()
        assert (path.stat().st_blocks * 512, path.stat().st_size) == (2 * SIZE, 10 * SIZE)


def test_more_holes_than_free_space_are_the_machines_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path, 2 * SIZE)
    registration = Registration(f"/{path.name}", 0, 2 * SIZE)
    taken: list[object] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(shared_file, "free_bytes", lambda: SIZE - 1)
    with pytest.raises(
        MachineError, match=rf"has holes, and /dev/shm has {SIZE - 1} bytes free for its {2 * SIZE}; giv"
    ):
        policy.open_registered(registration, Config(), FIELD, any_size)
    assert not taken


@pytest.mark.parametrize("key", ["/a\0b", "/\ud800"])
def test_a_key_that_no_file_can_have_is_refused(key: str) -> None:
    with pytest.raises(RegionRefusedError, match="it has a key that no file can have"):
        policy.open_registered(Registration(key, 0, SIZE), Config(), FIELD, any_size)


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


def bytes_of(found: Resolved) -> npt.NDArray[np.uint8]:
    memory = found.mapped.memory
    assert isinstance(memory, HostMemory)
    return memory.bytes()


def attributes_of(found: Resolved) -> BufferAttributes:
    assert isinstance(found.memory, HostMemory)
    return BufferAttributes(found.memory.memory_type, 0, found.memory.byte_size)


def test_a_region_without_room_is_not_pinned(cuda: PinningCuda, warnings: list[str], region: ManagedRegion) -> None:
    model = pinning_model(CudaAccess(lambda: cuda), warnings, limit=1)
    with pytest.raises(MachineError, match="SHM_MAX_MAPPED_BYTES"):
        mapped(model, region)
    assert pinned(cuda) == 0
    model.close()


def test_what_stays_pinned_is_unmapped_all_the_same(cuda: PinningCuda, model: Resolver, region: ManagedRegion) -> None:
    mapped(model, region)
    DRIVER.fail_next("cuMemHostUnregister", "CUDA_ERROR_UNKNOWN", process=MODEL)
    model.registry.free_all_names()
    unpin(cuda)
    assert Path("/proc/self/maps").read_text().count(f" {region.segment.identity[1]} ") == 1  # the client's
    ((address, _),) = cuda.pins
    CudaRuntime.unpin(cuda, address)  # CUDA still has it as pinned


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", "not enough memory left"),
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
        uses = [mapped(model, region) for region in regions]
        kinds = [attributes_of(use).memory_type for use in uses]
        assert kinds == [MemoryType.CPU, MemoryType.CPU, MemoryType.CPU_PINNED]
        assert len(warnings) == 1
        model.registry.free_all_names()
        assert pinned(cuda) == 1
        uses.clear()
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
