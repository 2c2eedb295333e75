"""How long a mapping lives: as its names, its uses and its object do."""

from __future__ import annotations

import os

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.testing.faults.memory import take_space_beyond
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, register, registry_of


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


def test_a_slot_of_a_region_whose_names_were_freed_meanwhile_is_not_remembered(manager: SharedMemoryManager) -> None:
    region, registry = ManagedRegion.create(PAGE), registry_of(manager)
    key, token = region.segment.key, region.header.token.hex()
    mapped = registry.obtain(key, lambda: MappedRegion(ManagedRegion.open(key, token, "r")), 0, 0, "r")
    manager.unregister(key)
    registry.add_slot("the slot's address", mapped, 0)
    assert registry.slots == {}
    region.segment.unlink()
    region.close()


def test_an_object_under_anothers_key_is_another_region(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    old = register(manager, "old", key)
    (SHM / key).unlink()
    (SHM / key).write_bytes(os.urandom(PAGE))
    new = register(manager, "new", key)
    assert new is not old
    assert manager.get_memory_info("new", 0, PAGE).memory.tobytes() == (SHM / key).read_bytes()


def test_a_name_can_be_given_again_while_its_region_is_used(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    old = register(manager, "mine", key)
    manager.unregister("mine")
    assert register(manager, "mine", key) is not old
    del old
    assert is_mapped(key)
    assert manager.get_memory_info("mine", 0, PAGE).memory.tobytes() == (SHM / key).read_bytes()


def test_a_part_that_an_object_has_lost_is_refused_though_there_is_as_much_before_it_and_space_behind(
    manager: SharedMemoryManager, make_file: MakeFile
) -> None:
    key = make_file(2 * PAGE)
    register(manager, "mine", key, PAGE, PAGE)
    os.truncate(SHM / key, PAGE)
    take_space_beyond(key, PAGE, PAGE)
    with pytest.raises(RegionRefusedError, match=f"but {PAGE} are there"):
        manager.get_memory_info("mine", 0, 1)


def test_what_was_unlinked_is_dropped_under_all_of_its_names(manager: SharedMemoryManager, make_file: MakeFile) -> None:
    key = make_file()
    register(manager, "first", key)
    register(manager, "second", key)
    (SHM / key).unlink()
    registry_of(manager).drop_abandoned()
    assert manager.status() == []


def test_what_was_unlinked_goes_though_it_grew(manager: SharedMemoryManager, make_file: MakeFile) -> None:
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
