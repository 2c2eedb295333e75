"""How much memory a process may have: the machine's, or what its groups leave it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from shm_backend_utils.memory import machine_memory
from shm_backend_utils.memory.machine_memory import available_bytes, memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEBIBYTE = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of /sys/fs/cgroup; this process is in its group ``pod/container``."""
    own, folder = tmp_path / "own", tmp_path / "groups"
    (folder / "pod" / "container").mkdir(parents=True)
    own.write_text("12:devices:/elsewhere\n0::/pod/container\n")
    monkeypatch.setattr(machine_memory, "_CGROUPS", folder)
    monkeypatch.setattr(machine_memory, "_OWN_CGROUP", own)
    return folder


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the machine says of its memory: as much is available as it has."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {MACHINE // 1024} kB\nMemAvailable:   {MACHINE // 1024} kB\n")
    monkeypatch.setattr(machine_memory, "_MEMINFO", file)
    return file


def limit(group: Path, most: str, used: int = 0, reclaimable: int | None = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    if reclaimable is not None:
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n")


def test_of_this_machine_something_is_told() -> None:
    assert 0 < memory_bytes() <= MACHINE
    assert 0 < available_bytes() < math.inf


def test_without_files_it_is_the_machines(groups: Path, meminfo: Path) -> None:
    assert memory_bytes() == MACHINE
    assert available_bytes() == MACHINE // 1024 * 1024


def test_a_containers_limit_counts(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod" / "container", str(64 * MEBIBYTE), used=20 * MEBIBYTE)
    assert memory_bytes() == 64 * MEBIBYTE
    assert available_bytes() == 44 * MEBIBYTE


def test_so_does_the_one_of_a_group_around_it(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", str(32 * MEBIBYTE), used=30 * MEBIBYTE)
    limit(groups / "pod" / "container", str(64 * MEBIBYTE), used=20 * MEBIBYTE)
    assert memory_bytes() == 32 * MEBIBYTE
    assert available_bytes() == 2 * MEBIBYTE


def test_pages_of_files_that_nobody_uses_are_available(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", str(64 * MEBIBYTE), used=60 * MEBIBYTE, reclaimable=10 * MEBIBYTE)
    assert available_bytes() == 14 * MEBIBYTE


def test_a_group_that_does_not_tell_of_them_has_none(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", str(64 * MEBIBYTE), used=60 * MEBIBYTE)
    (groups / "pod" / "memory.stat").write_text("anon 5\n")
    assert available_bytes() == 4 * MEBIBYTE


def test_what_is_used_beyond_a_limit_leaves_less_than_nothing(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", str(MEBIBYTE), used=2 * MEBIBYTE)
    assert available_bytes() <= 0


@pytest.mark.parametrize("most", ["max", "", "a word"])
def test_a_group_without_a_limit_is_passed_over(groups: Path, meminfo: Path, most: str) -> None:
    limit(groups / "pod" / "container", most)
    assert memory_bytes() == MACHINE


def test_a_group_whose_files_lack_is_passed_over(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod" / "container", str(MEBIBYTE), reclaimable=None)
    assert memory_bytes() == MACHINE


def test_a_limit_beyond_the_machine_is_none(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", str(2 * MACHINE))
    assert memory_bytes() == MACHINE
    assert available_bytes() <= MACHINE


def test_in_the_root_group_it_is_the_roots(groups: Path, meminfo: Path, tmp_path: Path) -> None:
    """A container sees its own group as the root, and there the limit is; a machine's root has none."""
    (tmp_path / "own").write_text("0::/\n")
    limit(groups, str(16 * MEBIBYTE))
    limit(groups / "pod", str(MEBIBYTE))
    assert memory_bytes() == 16 * MEBIBYTE


@pytest.mark.parametrize("own", ["", "3:memory:/pod/container\n", "0::/../../outside\n"])
def test_a_process_whose_groups_are_not_there_has_the_machines(
    groups: Path, meminfo: Path, tmp_path: Path, own: str
) -> None:
    (tmp_path / "own").write_text(own)
    limit(groups / "pod" / "container", str(MEBIBYTE))
    assert memory_bytes() == MACHINE


def test_a_process_that_is_not_told_its_group_has_the_machines(groups: Path, meminfo: Path, tmp_path: Path) -> None:
    limit(groups, str(MEBIBYTE))
    (tmp_path / "own").unlink()
    assert memory_bytes() == MACHINE


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemAvailable: much\n"])
def test_a_machine_that_does_not_tell_what_is_available_has_no_bound(
    groups: Path, meminfo: Path, text: str | None
) -> None:
    if text is None:
        meminfo.unlink()
    else:
        meminfo.write_text(text)
    assert available_bytes() == math.inf
