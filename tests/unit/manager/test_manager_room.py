"""How long a mapping lives, which unused one makes room for another; thousands make it no dearer for others."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.registry import Registry
from shm_backend_utils.testing.faults.memory import take_space_beyond
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, register, registry_of


def test_the_region_that_was_used_longest_ago_makes_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=2 * PAGE)
    register(manager, "first", make_file())
    register(manager, "second", make_file())
    manager.get_memory_info("first", 0, 1)
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
    registry_of(manager).begin_use(used)
    with pytest.raises(MachineError, match="the limit \\(SHM_MAX_MAPPED_BYTES\\) is 4096"):
        register(manager, "more", make_file())
    assert [status.name for status in manager.status()] == ["used"]
    registry_of(manager).end_use(used)
    del used
    register(manager, "more", make_file())
    manager.unregister_all()


def test_each_region_is_looked_at_once_as_it_may_be_taken_meanwhile(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    region = register(manager, "taken meanwhile", make_file())
    looks = itertools.chain([False, False], itertools.repeat(True))  # before the file is opened, and then
    monkeypatch.setattr(type(region), "is_in_use", property(lambda _: next(looks)))
    del region
    register(manager, "more", make_file())
    assert [status.name for status in manager.status()] == ["more"]
    with pytest.raises(MachineError, match="4096 are mapped and in use, and the limit"):
        register(manager, "and more", make_file())
    monkeypatch.undo()
    manager.unregister_all()


def test_a_region_that_never_fits_is_refused(make_file: MakeFile) -> None:
    key = make_file(2 * PAGE)
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    with pytest.raises(MachineError, match="a region of 8192 bytes cannot be mapped"):
        register(manager, "large", key)
    assert not is_mapped(key)


def test_a_region_that_does_not_fit_is_given_no_memory(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=3 * PAGE)
    used = register(manager, "used", make_file())
    registry_of(manager).begin_use(used)
    key = make_file(0)
    os.truncate(SHM / key, 3 * PAGE)
    with pytest.raises(MachineError, match="a region of 12288 bytes cannot be mapped: 4096 are mapped and in use"):
        register(manager, "holes", key, 0, 3 * PAGE)
    assert (SHM / key).stat().st_blocks == 0
    registry_of(manager).end_use(used)
    register(manager, "holes", key, 0, 3 * PAGE)
    assert (SHM / key).stat().st_blocks * 512 == 3 * PAGE
    manager.unregister_all()


def test_a_second_name_for_what_is_in_use_needs_no_room(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    key = make_file()
    region = register(manager, "first", key)
    registry_of(manager).begin_use(region)
    assert register(manager, "second", key) is region
    registry_of(manager).end_use(region)
    manager.unregister_all()


def test_a_file_that_has_grown_needs_room_for_all_of_it(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=2 * PAGE)
    key = make_file()
    region = register(manager, "first", key)
    registry_of(manager).begin_use(region)
    os.truncate(SHM / key, 2 * PAGE)
    with pytest.raises(MachineError, match="a region of 8192 bytes cannot be mapped"):
        register(manager, "second", key, 0, 2 * PAGE)
    assert (SHM / key).stat().st_blocks * 512 == PAGE
    registry_of(manager).end_use(region)
    manager.unregister_all()


def test_a_region_that_was_unregistered_in_use_still_counts_when_it_is_mapped_again(make_file: MakeFile) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=PAGE)
    key = make_file()
    region = register(manager, "mine", key)
    registry_of(manager).begin_use(region)
    manager.unregister("mine")
    with pytest.raises(MachineError):
        register(manager, "mine", key)
    registry_of(manager).end_use(region)


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


FEW = 16
LONG_S = 30.0

Identity = tuple[int, int]


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.unregister_all()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """Every region that was asked for its owner, each time; what it is, as a reference would keep it mapped."""
    looked_at: list[Identity] = []
    ask: Any = MappedRegion.is_abandoned

    def is_abandoned(region: MappedRegion) -> bool:
        looked_at.append(region.segment.identity)
        return bool(ask.fget(region))

    monkeypatch.setattr(MappedRegion, "is_abandoned", property(is_abandoned))
    return looked_at


def obtain(registry: Registry, key: str) -> MappedRegion:
    return registry.obtain(key, lambda: MappedRegion(SystemSegment.open(key, PAGE, "x")), 0, PAGE, "x")


def test_a_new_region_looks_at_few_others(registry: Registry, make_file: MakeFile, looked_at: list[Identity]) -> None:
    for _ in range(100):
        looked_at.clear()
        obtain(registry, make_file())
        assert len(looked_at) <= FEW


def test_new_regions_look_at_others_in_turn(registry: Registry, make_file: MakeFile, looked_at: list[Identity]) -> None:
    regions = [obtain(registry, make_file()).segment.identity for _ in range(4 * FEW)]
    looked_at.clear()
    for _ in range(8):
        obtain(registry, make_file())
    assert set(regions) <= set(looked_at)


def test_what_owners_leave_goes_as_new_regions_come_and_nobody_sweeps(registry: Registry, make_file: MakeFile) -> None:
    for _ in range(200):
        key = make_file()
        obtain(registry, key)
        (SHM / key).unlink()
        assert registry.mapped()[1] <= 2


def test_a_sweep_looks_at_all(registry: Registry, make_file: MakeFile) -> None:
    keys = [make_file() for _ in range(5 * FEW + 1)]
    for key in keys:
        obtain(registry, key)
        (SHM / key).unlink()
    registry.drop_abandoned()
    assert registry.mapped() == (0, 0)


def test_two_that_open_one_object_at_once_have_one_mapping(registry: Registry, make_file: MakeFile) -> None:
    key = make_file()
    both_open = threading.Barrier(2)

    def open_together() -> MappedRegion:
        both_open.wait(LONG_S)
        return MappedRegion(SystemSegment.open(key, PAGE, "x"))

    found: list[MappedRegion] = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.obtain(key, open_together, 0, PAGE, "x")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    assert registry.mapped() == (PAGE, 1)
