"""Names that several requests open at once: nobody waits for another one's mapping, and nobody gets another meaning."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from shm_backend_utils.errors import RegionGoneError
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.mapping.memory import HostMemory, Memory
from shm_backend_utils.model.mapping.registry import Registry
from shm_backend_utils.model.mapping.resolver import NamedRegions
from shm_backend_utils.protocol.claims import NamedRegionClaim
from shm_backend_utils.testing.faults.at_hand import punch_hole
from tests.unit.sessions import say_registered

SHM: Final = Path("/dev/shm")
PAGE: Final = 4096
CLAIM: Final = NamedRegionClaim("mine")
FIELD: Final = "regions[1]"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Registration]:
    found: dict[str, Registration] = {}
    say_registered(monkeypatch, lambda: found)
    return found


@pytest.fixture
def regions() -> Iterator[NamedRegions]:
    registry = Registry()
    with closing(NamedRegions(Config(), registry)) as regions:
        yield regions
    registry.unregister_all()


@pytest.fixture
def objects() -> Iterator[Callable[[int], str]]:
    made: list[Path] = []

    def make(value: int) -> str:
        made.append(SHM / f"beside-{os.getpid()}-{secrets.token_hex(8)}")
        made[-1].write_bytes(bytes([value]) * PAGE)
        return f"/{made[-1].name}"

    yield make
    for path in made:
        path.unlink()


def value_of(opened: tuple[Any, Memory]) -> int:
    memory = opened[1]
    assert isinstance(memory, HostMemory)
    return int(memory.bytes()[0])


def opened_with(regions: NamedRegions, registration: Registration) -> tuple[Any, Memory]:
    return regions.open(CLAIM, {"mine": registration}, FIELD)


def test_a_region_that_takes_long_to_map_holds_up_no_other_name(
    registered: dict[str, Registration],
    regions: NamedRegions,
    objects: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Registration(objects(1), 0, PAGE)
    registered["other"] = Registration(objects(2), 0, PAGE)
    begun, may_go, open_registered = threading.Event(), threading.Event(), policy.open_registered

    def open_slowly(registration: Registration, *more: Any) -> Any:
        if registration == slow:
            begun.set()
            assert may_go.wait(10)
        return open_registered(registration, *more)

    monkeypatch.setattr(policy, "open_registered", open_slowly)
    thread = threading.Thread(target=opened_with, args=(regions, slow))
    thread.start()
    try:
        assert begun.wait(10)
        other: list[int] = []
        honest = threading.Thread(
            target=lambda: other.append(value_of(regions.open(NamedRegionClaim("other"), dict(registered), FIELD)))
        )
        honest.start()
        honest.join(10)
        assert other == [2]
    finally:
        may_go.set()
        thread.join()


def test_one_who_was_told_before_and_maps_after_another_one_has_his_own_object_which_goes_with_the_next_sweep(
    registered: dict[str, Registration],
    regions: NamedRegions,
    objects: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = (Registration(objects(value), 0, PAGE) for value in (1, 2))
    registered["mine"] = new
    open_registered, values = policy.open_registered, []

    def be_overtaken(registration: Registration, *more: Any) -> Any:
        monkeypatch.setattr(policy, "open_registered", open_registered)
        values.append(value_of(opened_with(regions, new)))
        return open_registered(registration, *more)

    monkeypatch.setattr(policy, "open_registered", be_overtaken)
    values.append(value_of(opened_with(regions, old)))
    assert values == [2, 1]
    assert regions._registry.mapped()[1] == 2
    regions.sweep()
    assert regions._registry.mapped()[1] == 1
    assert value_of(opened_with(regions, new)) == 2
    registered.clear()
    regions.sweep()
    assert regions._registry.mapped()[1] == 0


def test_a_name_of_a_longer_part_gets_its_space(
    registered: dict[str, Registration], regions: NamedRegions, objects: Callable[[int], str]
) -> None:
    key = objects(1)
    os.truncate(SHM / key[1:], 3 * PAGE)  # with holes
    opened_with(regions, Registration(key, 0, PAGE))
    opened_with(regions, Registration(key, 0, 3 * PAGE))
    assert (SHM / key[1:]).stat().st_blocks * 512 == 3 * PAGE


def test_holes_in_a_part_that_was_mapped_later_than_another_one_are_noticed(
    registered: dict[str, Registration], regions: NamedRegions, objects: Callable[[int], str]
) -> None:
    key = objects(1)
    path = SHM / key[1:]
    os.truncate(path, 3 * PAGE)
    first, second = Registration(key, 0, PAGE), Registration(key, 2 * PAGE, PAGE)
    opened_with(regions, first)
    opened_with(regions, second)
    punch_hole(path.name, 2 * PAGE, PAGE)
    opened_with(regions, second)
    assert path.stat().st_blocks * 512 == 2 * PAGE, "it has its memory again"


def test_a_name_whose_object_cannot_be_mapped_goes(registered: dict[str, Registration], regions: NamedRegions) -> None:
    with pytest.raises(RegionGoneError):
        opened_with(regions, Registration("/beside-nobody", 0, PAGE))
    assert regions._known == {}
