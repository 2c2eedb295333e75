"""SharedMemoryManager: names, and what is registered under them; which unused region makes room; and threads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.errors import CallerError, MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.registry import Registry
from tests.opened import open_segment

SHM = Path("/dev/shm")
PAGE = 4096
MakeFile = Callable[..., str]


@pytest.fixture
def make_file() -> Iterator[MakeFile]:
    keys: list[str] = []

    def make(byte_size: int = PAGE) -> str:
        keys.append(f"foreign-{os.getpid()}-{secrets.token_hex(8)}")
        (SHM / keys[-1]).write_bytes(os.urandom(byte_size))
        return keys[-1]

    yield make
    for key in keys:
        (SHM / key).unlink(missing_ok=True)


@pytest.fixture
def manager() -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager()
    yield manager
    manager.unregister_all()


def register(manager: SharedMemoryManager, name: str, key: str, offset: int = 0, byte_size: int = PAGE) -> MappedRegion:
    manager.register_system_shared_memory(name, key, offset, byte_size)
    return registry_of(manager).names[name]


def registry_of(manager: SharedMemoryManager) -> Registry:
    return manager._registry


def is_mapped(key: str) -> bool:
    return f"{SHM}/{key}" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("key", ["", "/", ".", "..", "/..", "a/b", "../etc/passwd", "//a"])
def test_a_key_that_is_no_name_in_shared_memory_is_refused(manager: SharedMemoryManager, key: str) -> None:
    with pytest.raises(RegionRefusedError, match="not the name of an object directly in /dev/shm"):
        manager.register_system_shared_memory("mine", key, 0, PAGE)


def test_the_status_says_what_is_registered_once(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    register(manager, "first", f"/{first}")
    register(manager, "second", second, 16, 32)
    assert manager.status() == [RegionStatus("first", first, 0, PAGE), RegionStatus("second", second, 16, 32)]
    assert manager.status("second") == [RegionStatus("second", second, 16, 32)]
    for key in (make_file(), "foreign-nobody"):
        with pytest.raises(CallerError, match="region 'first' is registered already"):
            register(manager, "first", key)
    assert manager.status("first")[0].key == first
    for ask in (lambda: manager.status("mine"), lambda: manager.get_memory_info("mine", 0, 1)):
        with pytest.raises(RegionGoneError, match="region 'mine' is not registered"):
            ask()


def test_a_sweep_looks_at_all(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    keys = [make_file() for _ in range(40)]
    for key in keys:
        register(manager, key, key)
    for key in keys:
        (SHM / key).unlink()
    registry_of(manager).drop_abandoned()
    assert registry_of(manager).mapped() == (0, 0)


@pytest.mark.parametrize(("offset", "byte_size"), [(-1, 1), (0, -1), (1, 2**63 - 1), (2**63, 0), (2**64, -(2**64))])
def test_an_odd_range_fails(manager: SharedMemoryManager, make_file: MakeFile, offset: int, byte_size: int) -> None:
    with pytest.raises(CallerError, match="of region 'mine' were asked for"):
        register(manager, "mine", make_file(), offset, byte_size)


INTEGERS = st.one_of(
    st.integers(-2, PAGE + 2),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, PAGE, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
)


@pytest.fixture(scope="module")
def long_lived() -> Iterator[tuple[SharedMemoryManager, bytes]]:
    """A manager with one region, `part`: bytes 100 to 3100 of a page."""
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    (SHM / key).write_bytes(os.urandom(PAGE))
    manager = SharedMemoryManager()
    register(manager, "part", key, 100, 3000)
    yield manager, (SHM / key).read_bytes()[100:3100]
    manager.unregister_all()
    (SHM / key).unlink()


@given(offset=INTEGERS, byte_size=INTEGERS)
def test_any_part_is_exact_or_fails(long_lived: tuple[SharedMemoryManager, bytes], offset: int, byte_size: int) -> None:
    manager, content = long_lived
    if offset >= 0 and byte_size >= 0 and offset + byte_size <= len(content):
        info = manager.get_memory_info("part", offset, byte_size)
        assert info.memory.tobytes() == content[offset : offset + byte_size]
        assert info.attributes.byte_size == byte_size
    else:
        with pytest.raises(CallerError, match="of region 'part' were asked for; expected 0 to 3000"):
            manager.get_memory_info("part", offset, byte_size)


def opened(key: str) -> MappedRegion:
    return MappedRegion(open_segment(key, PAGE, "mine"))


def test_who_opens_a_region_late_gets_the_one_of_its_name(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    registry, first, second = registry_of(manager), make_file(), make_file()
    fast: list[MappedRegion] = []

    def open_late() -> MappedRegion:
        fast.append(registry.obtain("mine", lambda: opened(first), "mine"))
        return opened(second)

    assert registry.obtain("mine", open_late, "mine") is fast[0]
    assert not is_mapped(second)


def test_as_many_regions_make_room_as_are_needed_and_first_those_used_longest_ago(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=4 * PAGE)
    for name in ("first", "second", "third"):
        register(manager, name, make_file())
    manager.get_memory_info("first", 0, 1)
    register(manager, "large", make_file(3 * PAGE), 0, 3 * PAGE)
    assert [status.name for status in manager.status()] == ["first", "large"]
    assert manager.mapped_bytes == 4 * PAGE
    manager.unregister_all()


def test_a_region_in_use_does_not_make_room_nor_when_it_was_unregistered(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    used = register(manager, "used", make_file())
    registry_of(manager).begin_use(used)
    for names in (["used"], []):
        with pytest.raises(MachineError, match="the limit \\(SHM_MAX_MAPPED_BYTES\\) is 4096"):
            register(manager, "more", make_file())
        assert [status.name for status in manager.status()] == names
        manager.unregister("used")
    registry_of(manager).end_use(used)
    del used
    register(manager, "more", make_file())
    manager.unregister_all()


def test_a_region_that_does_not_fit_or_has_grown_is_given_no_memory(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=3 * PAGE)
    used = register(manager, "used", make_file())
    registry_of(manager).begin_use(used)
    key = make_file(0)
    os.truncate(SHM / key, 3 * PAGE)
    with pytest.raises(MachineError, match="a region of 12288 bytes cannot be mapped: 4096 are mapped and in use"):
        register(manager, "holes", key, 0, 3 * PAGE)
    assert (SHM / key).stat().st_blocks == 0
    registry_of(manager).end_use(used)
    region = register(manager, "holes", key, 0, 3 * PAGE)
    assert (SHM / key).stat().st_blocks * 512 == 3 * PAGE
    registry_of(manager).begin_use(region)
    os.truncate(SHM / key, 4 * PAGE)
    with pytest.raises(MachineError, match="a region of 16384 bytes cannot be mapped"):
        register(manager, "grown", key, 0, 4 * PAGE)
    assert (SHM / key).stat().st_blocks * 512 == 3 * PAGE
    registry_of(manager).end_use(region)
    manager.unregister_all()


def test_two_keys_of_one_object_share_one_mapping(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    (SHM / second).unlink()
    os.link(SHM / first, SHM / second)
    assert register(manager, "first", first) is register(manager, "second", second)


def test_what_was_unlinked_goes_though_it_grew(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "before", key)
    os.truncate(SHM / key, 2 * PAGE)
    register(manager, "after", key, 0, 2 * PAGE)
    assert (manager.mapped_bytes, manager.mapped_regions) == (3 * PAGE, 2)
    (SHM / key).unlink()
    registry_of(manager).drop_abandoned()
    assert manager.status() == []
    assert not is_mapped(key)
