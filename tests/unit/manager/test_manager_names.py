"""SharedMemoryManager: names, what is registered under them, and threads that register, find and free at once."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.errors import CallerError, MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.memory import HostMemory
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, register, registry_of


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_key_may_begin_with_a_slash(manager: SharedMemoryManager, make_file: MakeFile, slash: str) -> None:
    key = make_file()
    manager.register_system_shared_memory("mine", f"{slash}{key}", 0, PAGE)
    assert manager.get_memory_info("mine", 0, PAGE).memory.tobytes() == (SHM / key).read_bytes()


@pytest.mark.parametrize("key", ["", "/", ".", "..", "/..", "a/b", "../etc/passwd", "//a"])
def test_a_key_that_is_no_name_in_shared_memory_is_refused(manager: SharedMemoryManager, key: str) -> None:
    with pytest.raises(RegionRefusedError, match="not the name of an object directly in /dev/shm"):
        manager.register_system_shared_memory("mine", key, 0, PAGE)


def test_the_status_says_what_is_registered(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    register(manager, "first", first)
    register(manager, "second", second, 16, 32)
    assert manager.status() == [RegionStatus("first", first, 0, PAGE), RegionStatus("second", second, 16, 32)]
    assert manager.status("second") == [RegionStatus("second", second, 16, 32)]


def test_a_name_is_given_once(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first = make_file()
    register(manager, "mine", first)
    with pytest.raises(CallerError, match="region 'mine' is registered already"):
        register(manager, "mine", make_file())
    assert manager.status("mine")[0].key == first


def test_a_name_that_is_taken_says_so_before_any_is_opened(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    register(manager, "mine", make_file())
    with pytest.raises(CallerError, match="region 'mine' is registered already"):
        register(manager, "mine", "foreign-nobody")


@pytest.mark.parametrize(
    "ask", [lambda manager: manager.status("mine"), lambda manager: manager.get_memory_info("mine", 0, 1)]
)
def test_a_name_of_nothing_says_so(manager: SharedMemoryManager, ask: Callable[[SharedMemoryManager], object]) -> None:
    with pytest.raises(RegionGoneError, match="region 'mine' is not registered"):
        ask(manager)


def test_freeing_a_name_unmaps_its_region_and_no_other(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    register(manager, "first", first)
    register(manager, "second", second)
    manager.unregister("first")
    assert not is_mapped(first)
    assert is_mapped(second)
    assert [status.name for status in manager.status()] == ["second"]


def test_an_object_that_is_not_there(manager: SharedMemoryManager) -> None:
    with pytest.raises(RegionGoneError, match="region 'mine' does not exist"):
        register(manager, "mine", "foreign-nobody")
    assert manager.status() == []


@pytest.mark.parametrize(("offset", "byte_size"), [(0, PAGE + 1), (1, PAGE), (PAGE, 1)])
def test_a_small_object_fails(manager: SharedMemoryManager, make_file: MakeFile, offset: int, byte_size: int) -> None:
    key = make_file()
    with pytest.raises(RegionRefusedError, match=f"but {PAGE} are there"):
        register(manager, "mine", key, offset, byte_size)
    assert manager.status() == []
    assert not is_mapped(key)


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


def test_what_the_opener_raises_is_raised(manager: SharedMemoryManager) -> None:
    def opener() -> MappedRegion:
        raise RegionRefusedError("regions[0]", "of a rule")

    with pytest.raises(RegionRefusedError, match="of a rule"):
        registry_of(manager).register("mine", opener, 0, 1)
    assert registry_of(manager).find("mine") is None


def opened(key: str) -> MappedRegion:
    return MappedRegion(SystemSegment.open(key, PAGE, "mine"))


def test_a_name_given_while_a_region_is_opened_is_taken(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    registry, first, second = registry_of(manager), make_file(), make_file()

    def open_late() -> MappedRegion:
        registry.register("mine", lambda: opened(first), 0, PAGE)
        return opened(second)

    with pytest.raises(CallerError, match="region 'mine' is registered already"):
        registry.register("mine", open_late, 0, PAGE)
    assert manager.status("mine")[0].key == first
    assert not is_mapped(second)


def test_who_opens_a_region_late_gets_the_one_of_its_name(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    registry, first, second = registry_of(manager), make_file(), make_file()
    fast: list[MappedRegion] = []

    def open_late() -> MappedRegion:
        fast.append(registry.obtain("mine", lambda: opened(first), 0, PAGE, "mine"))
        return opened(second)

    assert registry.obtain("mine", open_late, 0, PAGE, "mine") is fast[0]
    assert manager.status("mine")[0].key == first
    assert not is_mapped(second)


def test_threads_do_not_disturb_each_other(make_file: MakeFile) -> None:
    keys = {make_file(): bytes([number]) * PAGE for number in range(4)}
    for key, content in keys.items():
        (SHM / key).write_bytes(content)
    manager = SharedMemoryManager(max_mapped_bytes=3 * PAGE)

    def work(seed: int) -> int:
        dice = random.Random(seed)
        served = 0
        for _ in range(400):
            key = dice.choice(list(keys))
            name = f"{key}-{dice.randrange(3)}"
            try:
                region = find_or_register(manager, name, key)
                registry_of(manager).begin_use(region)
            except MachineError:
                continue  # another thread freed the name, or everything is in use: a clear answer both
            assert content_of(region) == keys[key]
            if dice.random() < 0.3:
                manager.unregister(name)
            if dice.random() < 0.05:
                registry_of(manager).drop_abandoned()
            assert content_of(region) == keys[key]
            registry_of(manager).end_use(region)
            served += 1
        return served

    with ThreadPoolExecutor(8) as threads:
        assert min(threads.map(work, range(8))) > 0
    manager.unregister_all()
    assert manager.mapped_bytes == 0
    assert [key for key in keys if is_mapped(key)] == []


def content_of(region: MappedRegion) -> bytes:
    assert isinstance(region.memory, HostMemory)
    return region.memory.bytes().tobytes()


def find_or_register(manager: SharedMemoryManager, name: str, key: str) -> MappedRegion:
    while (found := registry_of(manager).find(name)) is None:
        with contextlib.suppress(CallerError):  # another thread was faster, and the name is taken
            return registry_of(manager).register(name, lambda: opened(key), 0, PAGE)
    return found[0]
