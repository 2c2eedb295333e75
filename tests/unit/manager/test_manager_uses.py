"""How long a mapping lives: as its names, its uses and its arrays do."""

from __future__ import annotations

import os

import numpy as np

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.mapped import MappedRegion
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, region_of, register, registry_of


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


def test_two_keys_of_one_managed_region_share_one_mapping(manager: SharedMemoryManager) -> None:
    region = ManagedRegion.create(PAGE)
    token, link = region.header.token.hex(), f"{region.segment.key}-link"
    os.link(SHM / region.segment.key, SHM / link)

    def mapping(key: str) -> MappedRegion:
        return registry_of(manager).obtain(key, lambda: MappedRegion(ManagedRegion.open(key, token, "r")), 0, 0, "r")

    try:
        assert mapping(region.segment.key) is mapping(link)
        assert manager.mapped_regions == 1
    finally:
        (SHM / link).unlink()
        region.segment.unlink()
        region.close()


def test_a_slot_of_a_region_whose_names_were_freed_meanwhile_is_not_remembered(manager: SharedMemoryManager) -> None:
    region, registry = ManagedRegion.create(PAGE), registry_of(manager)
    key, token = region.segment.key, region.header.token.hex()
    mapped = registry.obtain(key, lambda: MappedRegion(ManagedRegion.open(key, token, "r")), 0, 0, "r")
    manager.unregister(key)
    registry.add_slot("the slot's address", mapped, 0)
    assert registry.slots == {}
    region.segment.unlink()
    region.close()


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
