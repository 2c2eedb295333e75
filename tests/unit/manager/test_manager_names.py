"""SharedMemoryManager: names, what is registered under them, and parts of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.compat.shared_memory_manager import RegionStatus, SharedMemoryManager
from shm_backend_utils.errors import CallerError, RegionGoneError, RegionRefusedError
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, register


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
