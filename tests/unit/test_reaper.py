"""The reaper, against the real /dev/shm: it removes what is proven dead, and touches nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.memory import reaper, shared_file
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.reaper import RegionReport
from shm_backend_utils.protocol import layout
from tests.opened import open_region
from tests.unit.mapping.files import region_bytes
from tests.unit.sessions import session_of, tensor

NAME = "shmbu-1-0123456789abcdef"
pytestmark = pytest.mark.usefixtures("own_shm")


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(100, slot_count=2)
    yield region
    region.close()


def found(region: ManagedRegion) -> RegionReport:
    (report,) = [report for report in reaper.scan() if report.key == region.segment.key]
    return report


def path_of(region: ManagedRegion) -> Path:
    return shared_file.DEV_SHM / region.segment.key


@pytest.mark.parametrize(("byte_size", "slot_count"), [(3 * layout.PAGE_SIZE, 1), (layout.HEADER_LENGTH, 1), (0, 0)])
def test_a_dead_owners_region_is_removed_even_if_truncated(dead: Path, byte_size: int, slot_count: int) -> None:
    os.truncate(dead, byte_size)
    assert [report.key for report in reaper.scan()] == [dead.name]
    assert dead.exists(), "looking removes nothing"
    (removed,) = reaper.reap()
    assert (removed.key, removed.byte_size, removed.slot_count) == (dead.name, byte_size, slot_count)
    assert not removed.is_owner_alive
    assert not dead.exists()


def test_a_region_whose_owner_closed_and_forgot_it_is_removed_and_arrays_stay_valid(region: ManagedRegion) -> None:
    report = found(region)
    assert (report.byte_size, report.uid, report.slot_count) == (region.header.byte_size, os.geteuid(), 2)
    assert report.age_s >= 0
    assert report.is_owner_alive
    assert reaper.reap() == []
    assert path_of(region).exists()
    array = region.data()
    peer = open_region(region.segment.key, region.header.token.hex(), "regions[0]")
    region.close()
    assert not found(region).is_owner_alive, "it does not live for one that only has it open"
    reaper.reap()
    assert not path_of(region).exists()
    assert peer.segment.is_unlinked
    array[:] = 7
    assert set(array.tolist()) == {7}
    peer.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("shmbu-mine", b""), ("foreign-1-0123456789abcdef", region_bytes())),  # names that we would not give
        *(
            (NAME, content)
            for content in (b"SHMBUREG", b"somebody else's" * 1000, bytes(8192), b"X" + region_bytes()[1:])
        ),
    ],
)
def test_a_file_of_another_name_or_without_a_valid_header_stays(own_shm: Path, name: str, content: bytes) -> None:
    (own_shm / name).write_bytes(content)
    assert reaper.scan() == reaper.reap() == []
    assert (own_shm / name).read_bytes() == content


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, Path.symlink_to])
def test_what_is_no_file_stays_and_what_a_link_points_to(own_shm: Path, tmp_path: Path, make: Any) -> None:
    path, target = own_shm / NAME, tmp_path / "region"
    target.write_bytes(region_bytes())
    make(path, *[target] * (make is Path.symlink_to))
    assert reaper.scan() == []
    assert reaper.reap() == []
    assert os.path.lexists(path)
    assert target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_region_is_not_even_opened(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(dead, 65534, -1)
    assert [(report.key, report.uid) for report in reaper.scan()] == [(dead.name, 65534)]
    monkeypatch.delattr(reaper, "open_by_name")
    assert reaper.reap() == []
    assert dead.exists()


def before_the_file_is_looked_at_again(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen while the reaper is at work: the owner is proven dead, and the name is still there."""
    is_same_file = reaper._is_same_file

    def look(fd: int, path: Path) -> bool:
        happens()
        return is_same_file(fd, path)

    monkeypatch.setattr(reaper, "_is_same_file", look)


@pytest.mark.parametrize("left", [[], [b"of the new owner"]])
def test_what_took_a_dead_ones_place_stays(dead: Path, monkeypatch: pytest.MonkeyPatch, left: list[bytes]) -> None:
    def replace() -> None:
        dead.unlink()
        for content in left:
            dead.write_bytes(content)

    before_the_file_is_looked_at_again(monkeypatch, replace)
    assert reaper.reap() == []
    assert [path.read_bytes() for path in dead.parent.iterdir()] == left


def test_no_dead_owner_looks_alive_while_it_is_reaped(region: ManagedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = open_region(region.segment.key, region.header.token.hex(), "regions[0]")
    seen = []
    region.close()
    before_the_file_is_looked_at_again(monkeypatch, lambda: seen.append(peer.is_owner_gone))
    assert [report.key for report in reaper.reap()] == [region.segment.key]
    assert seen == [True]
    peer.close()


def test_a_second_reaper_leaves_alone_what_the_first_one_is_at(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[RegionReport] = []
    with monkeypatch.context() as patch:

        def reap_too() -> None:
            patch.undo()
            seconds.extend(reaper.reap())

        before_the_file_is_looked_at_again(patch, reap_too)
        assert [report.key for report in reaper.reap()] == [dead.name]
    assert seconds == []


def test_a_region_that_cannot_be_removed_keeps_no_other(own_shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stays, goes = [own_shm / f"shmbu-1-{number:016x}" for number in (1, 2)]
    for path in (stays, goes):
        path.write_bytes(region_bytes())
    unlink = Path.unlink

    def unlink_others(path: Path) -> None:
        if path == stays:
            raise PermissionError
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_others)
        assert [report.key for report in reaper.reap()] == [goes.name]
    assert list(own_shm.iterdir()) == [stays]


@pytest.mark.parametrize("pages", [1, 3])
def test_a_report_counts_the_slots_in_use(pages: int) -> None:
    region = ManagedRegion.create(100, 2, record_byte_size=pages * layout.PAGE_SIZE)
    assert found(region).slots_in_use == 0
    assert region.lease(1).take()
    assert found(region).slots_in_use == 1
    region.lease(1).give_back()
    assert found(region).slots_in_use == 0
    region.close()


def test_a_model_that_loads_removes_what_is_left(dead: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    def load() -> None:
        with session_of(monkeypatch, [tensor("IN")], [tensor("OUT")]):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        load()
        assert dead.exists()
    load()
    assert not dead.exists()
    monkeypatch.setattr(reaper, "DEV_SHM", tmp_path / "nowhere")
    load()
