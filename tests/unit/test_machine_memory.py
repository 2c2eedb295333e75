"""How much memory a process may have: the machine's, or what its groups leave it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from shm_backend_utils.memory import machine
from shm_backend_utils.memory.machine import available_bytes, memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEBIBYTE = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of /sys/fs/cgroup; this process is in its group ``pod/container``."""
    own, folder = tmp_path / "own", tmp_path / "groups"
    (folder / "pod" / "container").mkdir(parents=True)
    own.write_text("12:devices:/elsewhere\n0::/pod/container\n")
    monkeypatch.setattr(machine, "_CGROUPS", folder)
    monkeypatch.setattr(machine, "_OWN_CGROUP", own)
    return folder


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the machine says of its memory: as much is available as it has."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: {MACHINE // 1024} kB\nMemAvailable:   {MACHINE // 1024} kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", file)
    return file


Limit = tuple[int | str, int, int | None]


def limit(group: Path, most: int | str, used: int = 0, reclaimable: int | None = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    if reclaimable is not None:
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n")


def test_of_this_machine_something_is_told() -> None:
    assert 0 < memory_bytes() <= MACHINE
    assert 0 < available_bytes() < math.inf


ALL = MACHINE // 1024 * 1024
"""What is available without a limit: so many kB."""


@pytest.mark.parametrize(
    ("pod", "container", "most", "available"),
    [
        (None, None, MACHINE, ALL),
        (None, (64 * MEBIBYTE, 20 * MEBIBYTE, 0), 64 * MEBIBYTE, 44 * MEBIBYTE),
        ((32 * MEBIBYTE, 30 * MEBIBYTE, 0), (64 * MEBIBYTE, 20 * MEBIBYTE, 0), 32 * MEBIBYTE, 2 * MEBIBYTE),
        ((64 * MEBIBYTE, 60 * MEBIBYTE, 10 * MEBIBYTE), None, 64 * MEBIBYTE, 14 * MEBIBYTE),
        ((MEBIBYTE, 2 * MEBIBYTE, 0), None, MEBIBYTE, -MEBIBYTE),
        ((2 * MACHINE, 0, 0), None, MACHINE, ALL),
        *((None, (nothing, 0, 0), MACHINE, ALL) for nothing in ("max", "", "a word")),
        (None, (MEBIBYTE, 0, None), MACHINE, ALL),
    ],
    ids=["none", "own", "one around it", "unused pages", "beyond", "of the machine", "max", "", "a word", "files lack"],
)
def test_the_least_that_a_group_leaves_counts(
    groups: Path, meminfo: Path, pod: Limit | None, container: Limit | None, most: int, available: int
) -> None:
    for group, said in ((groups / "pod", pod), (groups / "pod" / "container", container)):
        if said is not None:
            limit(group, *said)
    assert (memory_bytes(), available_bytes()) == (most, available)


def test_a_group_that_does_not_tell_of_them_has_none(groups: Path, meminfo: Path) -> None:
    limit(groups / "pod", 64 * MEBIBYTE, used=60 * MEBIBYTE)
    (groups / "pod" / "memory.stat").write_text("anon 5\n")
    assert available_bytes() == 4 * MEBIBYTE


def test_in_the_root_group_it_is_the_roots(groups: Path, meminfo: Path, tmp_path: Path) -> None:
    """A container sees its own group as the root, and there the limit is; a machine's root has none."""
    (tmp_path / "own").write_text("0::/\n")
    limit(groups, 16 * MEBIBYTE)
    limit(groups / "pod", MEBIBYTE)
    assert memory_bytes() == 16 * MEBIBYTE


@pytest.mark.parametrize("own", [None, "", "3:memory:/pod/container\n", "0::/../../outside\n"])
def test_a_process_whose_groups_are_not_there_or_not_told_has_the_machines(
    groups: Path, meminfo: Path, tmp_path: Path, own: str | None
) -> None:
    limit(groups / "pod" / "container", MEBIBYTE)
    if own is None:
        (tmp_path / "own").unlink()
        limit(groups, MEBIBYTE)
    else:
        (tmp_path / "own").write_text(own)
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
