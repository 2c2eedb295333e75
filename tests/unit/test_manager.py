"""SharedMemoryManager: names, mappings, uses, and their ends."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import CallerError, MachineError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model import RegionStatus, SharedMemoryManager
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.tensors.attributes import MemoryType

SHM = Path("/dev/shm")
PAGE = 4096

OWNER = """
import sys
from shm_backend_utils.memory.managed import ManagedRegion
region = ManagedRegion.create(100)
print(region.segment.key, region.header.byte_size, region.header.token.hex(), flush=True)
sys.stdin.read()
"""

MakeFile = Callable[..., str]


@pytest.fixture
def make_file() -> Iterator[MakeFile]:
    """Make a file of random bytes in /dev/shm and return its key."""
    keys: list[str] = []

    def make(byte_size: int = PAGE) -> str:
        key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
        keys.append(key)
        (SHM / key).write_bytes(os.urandom(byte_size))
        return key

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
    return region_of(manager, name)


def region_of(manager: SharedMemoryManager, name: str) -> MappedRegion:
    found = manager.find(name)
    assert found is not None
    return found[0]


def is_mapped(key: str) -> bool:
    return f"{SHM}/{key}" in Path("/proc/self/maps").read_text()


def test_a_registered_region_is_the_objects_memory(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "mine", key)
    memory = manager.get_memory_info("mine", 0, PAGE).memory
    assert memory.tobytes() == (SHM / key).read_bytes()
    memory[:] = 7
    assert (SHM / key).read_bytes() == bytes([7]) * PAGE


def test_a_part_of_a_region_has_its_attributes(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    register(manager, "mine", make_file())
    attributes = manager.get_memory_info("mine", 8, 24).attributes
    assert attributes.memory_type is MemoryType.CPU
    assert (attributes.memory_type_id, attributes.byte_size, attributes.cuda_ipc_handle) == (0, 24, None)


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


def test_nothing_is_registered_at_first(manager: SharedMemoryManager) -> None:
    assert manager.status() == []
    assert manager.find("mine") is None


def test_a_name_is_given_once(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first = make_file()
    register(manager, "mine", first)
    with pytest.raises(CallerError, match="region 'mine' is registered already"):
        register(manager, "mine", make_file())
    assert manager.status("mine")[0].key == first


def test_a_name_that_was_freed_can_be_given_again(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    register(manager, "mine", make_file())
    manager.unregister("mine")
    second = make_file()
    register(manager, "mine", second)
    assert manager.status("mine")[0].key == second


@pytest.mark.parametrize(
    "ask", [lambda manager: manager.status("mine"), lambda manager: manager.get_memory_info("mine", 0, 1)]
)
def test_a_name_that_is_not_registered_says_so(
    manager: SharedMemoryManager, ask: Callable[[SharedMemoryManager], object]
) -> None:
    with pytest.raises(RegionGoneError, match="region 'mine' is not registered"):
        ask(manager)


def test_freeing_a_name_that_is_free_is_fine(manager: SharedMemoryManager) -> None:
    manager.unregister("mine")
    manager.unregister_all()


def test_freeing_a_name_unmaps_its_region_and_no_other(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    register(manager, "first", first)
    register(manager, "second", second)
    manager.unregister("first")
    assert not is_mapped(first)
    assert is_mapped(second)
    assert [status.name for status in manager.status()] == ["second"]


def test_freeing_every_name_unmaps_everything(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    keys = [make_file() for _ in range(3)]
    for key in keys:
        register(manager, key, key)
    manager.unregister_all()
    assert manager.status() == []
    assert manager.mapped_bytes == 0
    assert [key for key in keys if is_mapped(key)] == []


def test_an_object_that_is_not_there(manager: SharedMemoryManager) -> None:
    with pytest.raises(RegionGoneError, match="region 'mine' does not exist"):
        register(manager, "mine", "foreign-nobody")
    assert manager.status() == []


@pytest.mark.parametrize(("offset", "byte_size"), [(0, PAGE + 1), (1, PAGE), (PAGE, 1)])
def test_an_object_that_is_too_small_is_refused(
    manager: SharedMemoryManager, make_file: MakeFile, offset: int, byte_size: int
) -> None:
    key = make_file()
    with pytest.raises(RegionRefusedError, match=f"but {PAGE} are there"):
        register(manager, "mine", key, offset, byte_size)
    assert manager.status() == []
    assert not is_mapped(key)


@pytest.mark.parametrize(("offset", "byte_size"), [(-1, 1), (0, -1), (1, 2**63 - 1), (2**63, 0), (2**64, -(2**64))])
def test_an_offset_or_size_that_cannot_be_is_refused(
    manager: SharedMemoryManager, make_file: MakeFile, offset: int, byte_size: int
) -> None:
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
def test_any_part_is_exactly_these_bytes_or_refused(
    long_lived: tuple[SharedMemoryManager, bytes], offset: int, byte_size: int
) -> None:
    manager, content = long_lived
    if offset >= 0 and byte_size >= 0 and offset + byte_size <= len(content):
        info = manager.get_memory_info("part", offset, byte_size)
        assert info.memory.tobytes() == content[offset : offset + byte_size]
        assert info.attributes.byte_size == byte_size
    else:
        with pytest.raises(CallerError, match="of region 'part' were asked for; expected 0 to 3000"):
            manager.get_memory_info("part", offset, byte_size)


def test_two_names_of_one_object_share_one_mapping(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    assert register(manager, "first", key) is register(manager, "second", key, 16, 32)
    assert (manager.mapped_bytes, manager.mapped_regions) == (PAGE, 1)
    manager.get_memory_info("first", 16, 32).memory[:] = 9
    assert set(manager.get_memory_info("second", 0, 32).memory.tolist()) == {9}


def test_two_keys_of_one_object_share_one_mapping(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    first, second = make_file(), make_file()
    (SHM / second).unlink()
    os.link(SHM / first, SHM / second)
    assert register(manager, "first", first) is register(manager, "second", second)


def test_a_mapping_goes_with_its_last_name(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "first", key)
    register(manager, "second", key)
    manager.unregister("first")
    assert is_mapped(key)
    manager.unregister("second")
    assert not is_mapped(key)


def test_an_object_under_a_key_that_had_another_is_another_region(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    old = register(manager, "old", key)
    (SHM / key).unlink()
    (SHM / key).write_bytes(os.urandom(PAGE))
    new = register(manager, "new", key)
    assert new is not old
    assert manager.get_memory_info("new", 0, PAGE).memory.tobytes() == (SHM / key).read_bytes()


# Who holds a region uses it; a call does, while it is under way.


def test_a_region_in_use_is_closed_when_its_use_ends(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    use = register(manager, "mine", key)
    manager.unregister("mine")
    assert manager.status() == []
    assert is_mapped(key)
    del use
    assert not is_mapped(key)


def test_a_region_in_use_twice_is_closed_when_its_last_use_ends(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    uses = [register(manager, "mine", key), region_of(manager, "mine")]
    manager.unregister("mine")
    uses.pop()
    assert is_mapped(key)
    uses.pop()
    assert not is_mapped(key)


def test_a_name_can_be_given_again_while_its_old_region_is_in_use(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    old = register(manager, "mine", key)
    manager.unregister("mine")
    assert register(manager, "mine", key) is not old
    del old
    assert is_mapped(key)
    assert manager.get_memory_info("mine", 0, PAGE).memory.tobytes() == (SHM / key).read_bytes()


def test_a_region_that_is_still_registered_stays_after_its_use(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    use = register(manager, "mine", key)
    del use
    assert is_mapped(key)


def test_a_region_that_is_closed_has_no_descriptor(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names are all that is wanted
    register(manager, "mine", make_file())
    manager.unregister("mine")
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_arrays_outlive_their_name(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "mine", key)
    array = manager.get_memory_info("mine", 0, PAGE).memory
    manager.unregister("mine")
    array[:] = 3
    assert (SHM / key).read_bytes() == bytes([3]) * PAGE


def test_a_mapping_goes_with_its_last_array(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "mine", key)
    array = manager.get_memory_info("mine", 0, PAGE).memory[10:].view(np.uint8)
    manager.unregister("mine")
    assert is_mapped(key)
    del array
    assert not is_mapped(key)


def test_an_object_that_was_truncated_is_refused(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file(2 * PAGE)
    register(manager, "mine", key, 0, 2 * PAGE)
    os.truncate(SHM / key, PAGE)
    with pytest.raises(RegionRefusedError, match=f"but {PAGE} are there"):
        manager.get_memory_info("mine", 0, 1)


def test_an_object_that_was_removed_is_gone(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "mine", key)
    (SHM / key).unlink()
    with pytest.raises(RegionGoneError, match="was removed by its owner"):
        manager.get_memory_info("mine", 0, 1)


def test_what_was_unlinked_is_dropped(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    unlinked, kept = make_file(), make_file()
    for key in (unlinked, kept):
        register(manager, key, key)
    (SHM / unlinked).unlink()
    manager.drop_abandoned()
    assert [is_mapped(key) for key in (unlinked, kept)] == [False, True]
    assert [status.key for status in manager.status()] == [kept]


def test_what_was_unlinked_is_dropped_under_all_of_its_names(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "first", key)
    register(manager, "second", key)
    (SHM / key).unlink()
    manager.drop_abandoned()
    assert manager.status() == []


def test_what_was_unlinked_is_dropped_though_it_grew_between_two_registrations(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    register(manager, "before", key)
    os.truncate(SHM / key, 2 * PAGE)
    register(manager, "after", key, 0, 2 * PAGE)
    (SHM / key).unlink()
    manager.drop_abandoned()
    assert manager.status() == []
    assert not is_mapped(key)


def test_everything_that_is_mapped_counts(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "before", key)
    os.truncate(SHM / key, 2 * PAGE)
    register(manager, "after", key, 0, 2 * PAGE)
    assert (manager.mapped_bytes, manager.mapped_regions) == (3 * PAGE, 2)


def test_what_was_unlinked_while_it_is_in_use_is_dropped_after_it(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    use = register(manager, "mine", key)
    (SHM / key).unlink()
    manager.drop_abandoned()
    assert is_mapped(key)
    del use
    assert not is_mapped(key)


def test_the_region_of_a_living_owner_is_kept(manager: SharedMemoryManager) -> None:
    with owner() as process:
        key = register_managed(manager, process)
        manager.drop_abandoned()
        assert is_mapped(key)
        (SHM / key).unlink()


def test_the_region_of_an_owner_that_was_killed_is_dropped(manager: SharedMemoryManager) -> None:
    with owner() as process:
        key = register_managed(manager, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        manager.drop_abandoned()
        assert not is_mapped(key)
        assert manager.status() == []
        (SHM / key).unlink(missing_ok=True)


def test_an_unused_region_makes_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=2 * PAGE)
    keys = [make_file() for _ in range(3)]
    for name, key in zip(("first", "second", "third"), keys, strict=True):
        register(manager, name, key)
    assert [is_mapped(key) for key in keys] == [False, True, True]
    assert [status.name for status in manager.status()] == ["second", "third"]
    manager.unregister_all()


def test_the_region_that_was_used_longest_ago_makes_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=2 * PAGE)
    register(manager, "first", make_file())
    register(manager, "second", make_file())
    manager.get_memory_info("first", 0, 1)
    register(manager, "third", make_file())
    assert [status.name for status in manager.status()] == ["first", "third"]
    manager.unregister_all()


def test_a_call_counts_as_use(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=2 * PAGE)
    first = register(manager, "first", make_file())
    register(manager, "second", make_file())
    manager.begin_use([first])
    manager.end_use([first])
    register(manager, "third", make_file())
    assert [status.name for status in manager.status()] == ["first", "third"]
    manager.unregister_all()


def test_as_many_regions_go_as_are_needed(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=4 * PAGE)
    for name in ("first", "second", "third"):
        register(manager, name, make_file())
    register(manager, "large", make_file(3 * PAGE), 0, 3 * PAGE)
    assert [status.name for status in manager.status()] == ["third", "large"]
    assert manager.mapped_bytes == 4 * PAGE
    manager.unregister_all()


def test_a_region_in_use_does_not_make_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    used = register(manager, "used", make_file())
    manager.begin_use([used])
    with pytest.raises(MachineError, match="the limit \\(SHM_MAX_MAPPED_BYTES\\) is 4096"):
        register(manager, "more", make_file())
    assert [status.name for status in manager.status()] == ["used"]
    manager.end_use([used])
    del used
    register(manager, "more", make_file())
    manager.unregister_all()


def test_a_region_that_never_fits_is_refused(make_file: MakeFile) -> None:
    key = make_file(2 * PAGE)
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    with pytest.raises(MachineError, match="a region of 8192 bytes cannot be mapped"):
        register(manager, "large", key)
    assert not is_mapped(key)


def test_a_region_that_never_fits_takes_nobodys_place(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    register(manager, "small", make_file())
    with pytest.raises(MachineError):
        register(manager, "large", make_file(2 * PAGE))
    assert [status.name for status in manager.status()] == ["small"]
    manager.unregister_all()


def test_a_second_name_needs_no_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    key = make_file()
    assert register(manager, "first", key) is register(manager, "second", key)
    manager.unregister_all()


def test_a_region_that_was_unregistered_in_use_still_counts(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    region = register(manager, "mine", make_file())
    manager.begin_use([region])
    manager.unregister("mine")
    with pytest.raises(MachineError):
        register(manager, "more", make_file())
    manager.end_use([region])


def test_a_region_that_was_unregistered_in_use_still_counts_when_it_is_mapped_again(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    key = make_file()
    region = register(manager, "mine", key)
    manager.begin_use([region])
    manager.unregister("mine")
    with pytest.raises(MachineError):
        register(manager, "mine", key)
    manager.end_use([region])


def test_what_the_opener_raises_is_raised(manager: SharedMemoryManager) -> None:
    def opener() -> MappedRegion:
        raise RegionRefusedError("regions[0]", "of a rule")

    with pytest.raises(RegionRefusedError, match="of a rule"):
        manager.register("mine", opener, 0, 1)
    assert manager.find("mine") is None


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
                manager.begin_use([region])
            except MachineError:
                continue  # another thread freed the name, or everything is in use: a clear answer both
            assert region.memory.bytes().tobytes() == keys[key]
            if dice.random() < 0.3:
                manager.unregister(name)
            if dice.random() < 0.05:
                manager.drop_abandoned()
            assert region.memory.bytes().tobytes() == keys[key]
            manager.end_use([region])
            served += 1
        return served

    with ThreadPoolExecutor(8) as threads:
        assert min(threads.map(work, range(8))) > 0
    manager.unregister_all()
    assert manager.mapped_bytes == 0
    assert [key for key in keys if is_mapped(key)] == []


def find_or_register(manager: SharedMemoryManager, name: str, key: str) -> MappedRegion:
    while (found := manager.find(name)) is None:
        with contextlib.suppress(CallerError):  # another thread was faster, and the name is taken
            return manager.register(name, lambda: MappedRegion(SystemSegment.open(key, PAGE, name)), 0, PAGE)
    return found[0]


def owner() -> subprocess.Popen[str]:
    """Start a process that owns a managed region, until it is killed or its standard input ends."""
    return subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def register_managed(manager: SharedMemoryManager, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    key, byte_size, token = process.stdout.readline().split()
    manager.register(key, lambda: MappedRegion(ManagedRegion.open(key, token, "regions[0]")), 0, int(byte_size))
    return key
