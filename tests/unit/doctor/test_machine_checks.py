"""What the doctor finds on a machine: each trouble is made, and found with its figures."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.cli import shared_memory
from shm_backend_utils.cli.doctor import server_checks
from shm_backend_utils.cli.doctor.server_checks import findings_on_machine
from shm_backend_utils.cli.doctor.troubles import MachineTrouble, Trouble
from shm_backend_utils.memory import reaper, shared_file
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header

MIB = 2**20
GIB = 2**30
POOL = "triton_python_backend_shm_region_0123"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm that stands for it, and no processes."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir="/dev/shm"))
    (folder / "no processes").mkdir()
    for module in (shared_memory, reaper, shared_file, server_checks):
        monkeypatch.setattr(module, "DEV_SHM", folder)
    monkeypatch.setattr(shared_memory, "_PROC", folder / "no processes")
    give_memory(monkeypatch)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def give_memory(
    monkeypatch: pytest.MonkeyPatch,
    *,
    shm: int = 8 * GIB,
    free: float = 8 * GIB,
    most: int = 16 * GIB,
    left: float = 8 * GIB,
) -> None:
    """Have a machine with so much memory."""
    monkeypatch.setattr(server_checks, "total_bytes", lambda: shm)
    monkeypatch.setattr(server_checks, "memory_bytes", lambda: most)
    monkeypatch.setattr(server_checks, "free_bytes", lambda: free)
    monkeypatch.setattr(server_checks, "available_bytes", lambda: left)


def only(trouble: Trouble) -> str:
    """Examine the machine; return what was found of this trouble, and see that there is no other."""
    (found,) = findings_on_machine()
    assert found.trouble is trouble
    assert "\n" not in found.found
    return found.found


def leave_region(folder: Path) -> None:
    """Leave the region of a process that is gone."""
    size = layout.data_offset(1, layout.PAGE_SIZE)
    memory = bytearray(size)
    layout.write_header(memoryview(memory), Header(1, size, bytes(16)))
    (folder / "shmbu-1-0123456789abcdef").write_bytes(memory)


def show_process(folder: Path, pid: int, command: str, maps: str | None) -> None:
    """Have a process; without what it has mapped, it may not be looked into."""
    process = folder / "no processes" / str(pid)
    (process / "fd").mkdir(parents=True)
    (process / "comm").write_text(f"{command}\n")
    (process / "maps").write_text(maps or "")


def test_a_machine_without_troubles_has_no_findings() -> None:
    assert findings_on_machine() == []


def test_no_dev_shm(folder: Path) -> None:
    shutil.rmtree(folder)
    assert only(MachineTrouble.NO_DEV_SHM) == f"{folder} is not there, or no folder"


def test_dev_shm_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)  # root may write anywhere
    assert only(MachineTrouble.DEV_SHM_NOT_WRITABLE) == f"user {os.geteuid()} may not write to {folder}"


def test_dockers_default(monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, shm=64 * MIB, free=60 * MIB)
    assert only(MachineTrouble.DEV_SHM_SMALL).endswith("has 64 MiB; expected 256 MiB or more")


@pytest.mark.parametrize(("shm", "free"), [(GIB, 50 * MIB), (64 * GIB, GIB - 1), (GIB, 0)])
def test_dev_shm_that_is_nearly_full(monkeypatch: pytest.MonkeyPatch, shm: int, free: int) -> None:
    give_memory(monkeypatch, shm=shm, free=free, most=64 * GIB)
    assert " left of " in only(MachineTrouble.DEV_SHM_FULL)


@pytest.mark.parametrize(("shm", "free"), [(GIB, 200 * MIB), (64 * GIB, 2 * GIB)])
def test_dev_shm_that_is_not(monkeypatch: pytest.MonkeyPatch, shm: int, free: int) -> None:
    give_memory(monkeypatch, shm=shm, free=free, most=64 * GIB)
    assert findings_on_machine() == []


def test_a_region_of_a_dead_owner(folder: Path) -> None:
    leave_region(folder)
    assert only(MachineTrouble.STALE_REGIONS) == "1 with 8 KiB, the oldest of them 0 s old"


def test_a_pool_that_nobody_has_mapped(folder: Path) -> None:
    (folder / POOL).write_bytes(bytes(2 * MIB))
    show_process(folder, 7, "python3", "7f0000000000-7f0000001000 r--p 00000000 fe:00 1234       /usr/bin/python3\n")
    assert only(MachineTrouble.LEFTOVER_POOLS) == "1 of 1, with 2 MiB"


def test_a_pool_that_a_server_has_mapped(folder: Path) -> None:
    (folder / POOL).write_bytes(bytes(MIB))
    status = (folder / POOL).stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"
    show_process(folder, 7, "tritonserver", f"7f0000000000-7f0000100000 rw-s 00000000 {place}       {folder / POOL}\n")
    assert findings_on_machine() == []


@pytest.mark.parametrize(
    ("hidden", "codes"), [("triton_python_b", []), ("tritonserver", []), ("systemd", ["leftover-pools"])]
)
def test_a_pool_that_a_server_of_another_user_may_have_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, codes: list[str]
) -> None:
    (folder / POOL).write_bytes(bytes(MIB))
    show_process(folder, 7, hidden, None)
    refuse = PermissionError("another user's")

    def fail(_: Path) -> list[shared_memory.MappedObject]:
        raise refuse

    monkeypatch.setattr(shared_memory, "_mapped", fail)
    assert [found.trouble.code for found in findings_on_machine()] == codes


@pytest.mark.parametrize("left", [100 * MIB, 0, -5])
def test_hardly_any_memory_left(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    give_memory(monkeypatch, left=left)
    assert only(MachineTrouble.LITTLE_MEMORY).endswith("of 16 GiB can still be had")
