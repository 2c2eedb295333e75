"""``shm-backend-utils regions`` tells of sealed memory, which is found by who holds it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli.shared_memory import Holder, SealedMemory, find_sealed_memory
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion

HOLDING = """
import mmap, os, sys
descriptor = int(sys.argv[1])
mapped = mmap.mmap(descriptor, 0)
print("ready", flush=True)
sys.stdin.read()
"""


pytestmark = pytest.mark.usefixtures("own_shm")


@pytest.fixture(autouse=True)
def proc(own_proc: Path) -> Path:
    show(own_proc, os.getpid())
    return own_proc


def show(proc: Path, pid: int) -> None:
    (proc / str(pid)).symlink_to(f"/proc/{pid}")


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(100, slot_count=3, kind=RegionKind.SEALED)
    yield region
    region.close()


@contextlib.contextmanager
def holding(region: ManagedRegion, proc: Path) -> Iterator[int]:
    fd = os.open(f"/proc/self/fd/{region.segment.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING, str(fd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
        )
    finally:
        os.close(fd)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        show(proc, process.pid)
        yield process.pid


def inode(region: ManagedRegion) -> int:
    return region.segment.identity[1]


def found(number: int) -> SealedMemory:
    (memory,) = [each for each in find_sealed_memory().found if each.inode == number]
    return memory


def test_it_is_found_by_its_owner(region: ManagedRegion) -> None:
    memory = found(inode(region))
    assert [holder.pid for holder in memory.holders] == [os.getpid()]
    assert (memory.byte_size, memory.uid) == (region.header.byte_size, os.geteuid())
    assert (memory.is_owner_alive, memory.slot_count, memory.slots_in_use) == (True, 3, 0)
    assert region.lease(1).take()
    assert found(inode(region)).slots_in_use == 1


def test_every_process_that_has_it_is_named_once_and_its_holders_keep_it(region: ManagedRegion, proc: Path) -> None:
    number = inode(region)
    (proc / "7").mkdir()  # one that ends meanwhile
    with holding(region, proc) as pid:
        command = Path(f"/proc/{pid}/comm").read_text().strip()
        memory = found(number)
        assert sorted(holder.pid for holder in memory.holders) == sorted([os.getpid(), pid])
        assert Holder(pid, command) in memory.holders
        assert find_sealed_memory().is_complete
        region.close()
        memory = found(number)
        assert memory.is_owner_alive is False
        assert pid in [holder.pid for holder in memory.holders]


def test_what_is_mapped_alone_is_found_too(region: ManagedRegion, proc: Path) -> None:
    """A result outlives its client's descriptors, and then nobody can be asked about the owner."""
    device = region.segment.identity[0]
    place = f"{os.major(device):02x}:{os.minor(device):02x} {inode(region)}"
    (proc / str(os.getpid())).unlink()
    folder = proc / "77"
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text("python3\n")
    (folder / "maps").write_text(
        "7f0000000000-7f0000001000 r--p 00000000 fe:00 1234                       /usr/bin/python3\n"
        f"7f0000001000-7f0000003000 rw-s 00000000 {place}                        /memfd:shmbu (deleted)\n"
        f"7f0000008000-7f0000009000 rw-s 00003000 {place}                        /memfd:shmbu (deleted)\n"
        f"7f000000a000-7f000000b000 rw-s 00000000 {place}1                       /memfd:soak (deleted)\n"
    )
    memory = SealedMemory(inode(region), 4 * mmap.PAGESIZE, holders=[Holder(77, "python3")])
    assert find_sealed_memory().found == [memory]
    assert cli.main(["regions"]) == 0


def test_looking_leaves_everything_as_it_is(region: ManagedRegion) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    find_sealed_memory()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert not locks.is_owner_alive(region.segment.fileno())  # as seen by the description that has the lease


def test_processes_that_may_not_be_looked_into_are_told_of(
    region: ManagedRegion, proc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (proc / "1" / "fd").mkdir(parents=True)
    (proc / "1" / "maps").touch()
    (proc / "1" / "comm").touch()
    listdir = os.listdir

    def list_own(path: Path) -> list[str]:
        if path == proc / "1" / "fd":
            raise PermissionError(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", list_own)
    assert not find_sealed_memory().is_complete
    cli.main(["regions"])
    assert (
        "1 sealed, 0 with a dead owner; processes that this user may not look into may hold more"
        in capsys.readouterr().out
    )


def test_the_table_has_a_line_for_it_and_reaping_has_nothing_to_do_with_it(
    region: ManagedRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["regions", "--reap"]) == 0
    assert capsys.readouterr().out == "0 removed\n"
    assert cli.main(["regions"]) == 0
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if line.startswith(f"inode {inode(region)} "))
    assert all(each in row for each in (" 20 KiB ", " alive ", " 0/3 ", f" {os.getpid()} "))
    assert "SEALED MEMORY" in output


def test_json_has_an_object_for_it(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (it,) = [each for each in objects if each["kind"] == "sealed" and each["inode"] == inode(region)]
    assert it.pop("holders") == [{"pid": os.getpid(), "command": Path("/proc/self/comm").read_text().strip()}]
    assert it == {
        "kind": "sealed",
        "inode": inode(region),
        "byte_size": region.header.byte_size,
        "uid": os.geteuid(),
        "is_owner_alive": True,
        "slot_count": 3,
        "slots_in_use": 0,
    }
