"""What the doctor finds on a machine: each trouble is made, and found with its figures."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from shm_backend_utils.cli import shared_memory
from shm_backend_utils.cli.doctor import server_checks
from shm_backend_utils.cli.doctor.server_checks import findings_on_machine
from shm_backend_utils.cli.doctor.troubles import Trouble

MIB = 2**20
GIB = 2**30
POOL = "triton_python_backend_shm_region_0123"


@pytest.fixture(autouse=True)
def folder(own_shm: Path, own_proc: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    give_memory(monkeypatch, total=8 * GIB, free=8 * GIB, memory=16 * GIB, available=8 * GIB)
    return own_shm


def give_memory(monkeypatch: pytest.MonkeyPatch, **amounts: int) -> None:
    for name, amount in amounts.items():
        monkeypatch.setattr(server_checks, f"{name}_bytes", lambda amount=amount: amount)


def only(trouble: Trouble) -> str:
    """Examine the machine; return what was found of this trouble, and see that there is no other."""
    (found,) = findings_on_machine()
    assert found.trouble is trouble
    assert "\n" not in found.found
    return found.found


def show_process(proc: Path, pid: int, command: str, maps: str | None) -> None:
    """Have a process; without what it has mapped, it may not be looked into."""
    process = proc / str(pid)
    (process / "fd").mkdir(parents=True)
    (process / "comm").write_text(f"{command}\n")
    (process / "maps").write_text(maps or "")


def test_no_dev_shm(folder: Path) -> None:
    shutil.rmtree(folder)
    assert only(Trouble.NO_DEV_SHM) == f"{folder} is missing, or not a folder"


def test_dev_shm_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)  # root may write anywhere
    assert only(Trouble.DEV_SHM_NOT_WRITABLE) == f"user {os.geteuid()} may not write to {folder}"


def test_dockers_default(monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, total=64 * MIB, free=60 * MIB)
    assert only(Trouble.DEV_SHM_SMALL).endswith("has 64 MiB; expected 256 MiB or more")


@pytest.mark.parametrize(("shm", "free", "enough"), [(GIB, 50 * MIB, 200 * MIB), (64 * GIB, GIB - 1, 2 * GIB)])
def test_dev_shm_that_is_nearly_full(monkeypatch: pytest.MonkeyPatch, shm: int, free: int, enough: int) -> None:
    give_memory(monkeypatch, total=shm, free=free, memory=64 * GIB)
    assert " left of " in only(Trouble.DEV_SHM_FULL)
    give_memory(monkeypatch, total=shm, free=enough, memory=64 * GIB)
    assert findings_on_machine() == []


@pytest.mark.usefixtures("dead")
def test_a_region_of_a_dead_owner() -> None:
    assert only(Trouble.STALE_REGIONS) == "1 with 8 KiB, the oldest of them 0 s old"


def test_a_pool_that_nobody_has_mapped_and_one_that_a_server_has(folder: Path, own_proc: Path) -> None:
    (folder / POOL).write_bytes(bytes(2 * MIB))
    show_process(own_proc, 7, "python3", "7f0000000000-7f0000001000 r--p 00000000 fe:00 1234       /usr/bin/python3\n")
    assert only(Trouble.LEFTOVER_POOLS) == "1 of 1, with 2 MiB"
    status = (folder / POOL).stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"
    maps = f"7f0000000000-7f0000200000 rw-s 00000000 {place}       {folder / POOL}\n"
    show_process(own_proc, 8, "tritonserver", maps)
    assert findings_on_machine() == []


@pytest.mark.parametrize(
    ("hidden", "codes"), [("triton_python_b", []), ("tritonserver", []), ("systemd", ["leftover-pools"])]
)
def test_a_pool_that_a_server_of_another_user_may_have_mapped(
    folder: Path, own_proc: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, codes: list[str]
) -> None:
    (folder / POOL).write_bytes(bytes(MIB))
    show_process(own_proc, 7, hidden, None)

    def fail(_: Path) -> list[shared_memory.MappedObject]:
        raise PermissionError("another user's")

    monkeypatch.setattr(shared_memory, "_mapped", fail)
    assert [found.trouble.code for found in findings_on_machine()] == codes


@pytest.mark.parametrize("left", [100 * MIB, 0, -5])
def test_hardly_any_memory_left(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    give_memory(monkeypatch, available=left)
    assert only(Trouble.LITTLE_MEMORY).endswith("of 16 GiB is still available")
