"""Threads that register, find and free at once, and openers that fail."""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from shm_backend_utils.compat.shared_memory_manager import SharedMemoryManager
from shm_backend_utils.errors import CallerError, MachineError, RegionRefusedError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.memory import HostMemory
from tests.unit.manager.registering import PAGE, SHM, MakeFile, is_mapped, registry_of


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
