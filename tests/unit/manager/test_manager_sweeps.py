"""Mappings of objects that were truncated or removed, or whose owner is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.testing.faults.memory import take_space_beyond
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, register, registry_of

OWNER = """
import sys
from shm_backend_utils.memory.managed import ManagedRegion
region = ManagedRegion.create(100)
print(region.segment.key, region.header.byte_size, region.header.token.hex(), flush=True)
sys.stdin.read()
"""


def test_an_object_that_was_truncated_is_refused(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file(2 * PAGE)
    register(manager, "mine", key, 0, 2 * PAGE)
    os.truncate(SHM / key, PAGE)
    with pytest.raises(RegionRefusedError, match=f"but {PAGE} are there"):
        manager.get_memory_info("mine", 0, 1)


def test_a_part_that_an_object_has_lost_is_refused_though_there_is_as_much_before_it_and_space_behind(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file(2 * PAGE)
    register(manager, "mine", key, PAGE, PAGE)
    os.truncate(SHM / key, PAGE)
    take_space_beyond(key, PAGE, PAGE)
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
    registry_of(manager).drop_abandoned()
    assert [is_mapped(key) for key in (unlinked, kept)] == [False, True]
    assert [status.key for status in manager.status()] == [kept]


def test_what_was_unlinked_is_dropped_under_all_of_its_names(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "first", key)
    register(manager, "second", key)
    (SHM / key).unlink()
    registry_of(manager).drop_abandoned()
    assert manager.status() == []


def test_what_was_unlinked_is_dropped_though_it_grew_between_two_registrations(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file()
    register(manager, "before", key)
    os.truncate(SHM / key, 2 * PAGE)
    register(manager, "after", key, 0, 2 * PAGE)
    (SHM / key).unlink()
    registry_of(manager).drop_abandoned()
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
    registry_of(manager).drop_abandoned()
    assert is_mapped(key)
    del use
    assert not is_mapped(key)


def test_the_region_of_a_living_owner_is_kept(manager: SharedMemoryManager) -> None:
    with owner() as process:
        key = register_managed(manager, process)
        registry_of(manager).drop_abandoned()
        assert is_mapped(key)
        (SHM / key).unlink()


def test_the_region_of_an_owner_that_was_killed_is_dropped(manager: SharedMemoryManager) -> None:
    with owner() as process:
        key = register_managed(manager, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        registry_of(manager).drop_abandoned()
        assert not is_mapped(key)
        assert manager.status() == []
        (SHM / key).unlink(missing_ok=True)


def owner() -> subprocess.Popen[str]:
    """Start a process that owns a managed region, until it is killed or its standard input ends."""
    return subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def register_managed(manager: SharedMemoryManager, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    key, byte_size, token = process.stdout.readline().split()
    registry_of(manager).register(
        key, lambda: MappedRegion(ManagedRegion.open(key, token, "regions[0]")), 0, int(byte_size)
    )
    return key
