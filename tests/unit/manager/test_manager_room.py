"""The limit of what is mapped: which unused region makes room."""

from __future__ import annotations

import itertools
import os

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import MachineError
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
