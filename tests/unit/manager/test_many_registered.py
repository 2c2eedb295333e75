"""Who registers thousands of regions makes it no dearer for others: each new one looks at a few, in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.registry import Registry
from tests.unit.manager.registering import PAGE, SHM, MakeFile

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
