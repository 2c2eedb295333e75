"""``shm-backend-utils regions`` of a /dev/shm of its own: regions, sealed memory, and pools of the Python backend."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli import regions, shared_memory
from shm_backend_utils.cli.shared_memory import Holder, SealedMemory, Search, find_pools, look_into_processes
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.memory.shared_file import USUAL_POOL_PREFIX, is_pool, prefix_of_pools
from tests.unit.answering_server import telling_registrations
from tests.unit.mapping.files import region_bytes

pytestmark = pytest.mark.usefixtures("own_shm", "proc")
Told = Callable[..., str]
POOL = "triton_python_backend_shm_region_0123"


@pytest.fixture
def proc(own_proc: Path) -> Path:
    show(own_proc, os.getpid())
    return own_proc


def show(proc: Path, pid: int) -> None:
    (proc / str(pid)).symlink_to(f"/proc/{pid}")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*arguments: str) -> str:
        assert cli.main(["regions", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(100, slot_count=3)
    yield region
    region.close()


def line_of(region: ManagedRegion, output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(region.segment.key))


def object_with(output: str, **fields: object) -> dict[str, Any]:
    objects: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    (found,) = [each for each in objects if fields.items() <= each.items()]
    assert found.pop("age_s", 0) >= 0
    return found


def of_both_kinds(kind: str, region: ManagedRegion, slots_in_use: int = 0) -> dict[str, Any]:
    owner = {"byte_size": region.header.byte_size, "uid": os.geteuid(), "is_owner_alive": True}
    return {"kind": kind, **owner, "slot_count": 3, "slots_in_use": slots_in_use}


def test_the_table_has_a_line_for_a_region_and_json_an_object(region: ManagedRegion, told: Told) -> None:
    output = told()
    header, *_, summary = output.splitlines()
    assert header.split() == ["REGION", "SIZE", "USER", "OWNER", "AGE", "IN", "USE", "REGISTERED", "AS"]
    assert line_of(region, output).split()[1:3] == ["20", "KiB"]
    assert line_of(region, output).split()[-3:] == ["s", "0/3", "-"]
    assert " alive " in line_of(region, output)
    assert summary == "1 region in /dev/shm, 0 with a dead owner"
    assert region.lease(2).take()
    assert " 1/3 " in line_of(region, told())
    assert object_with(told("--json"), key=region.segment.key) == {
        **of_both_kinds("system", region, slots_in_use=1),
        "key": region.segment.key,
        "registered_as": [],
    }


def test_what_the_dead_left_is_reaped_on_demand(region: ManagedRegion, dead: Path, own_shm: Path, told: Told) -> None:
    advice = "2 regions in /dev/shm, 1 with a dead owner; `shm-backend-utils regions --reap` removes this user's"
    assert told().splitlines()[-1] == advice
    assert dead.exists()
    _, row, summary = told("--reap").splitlines()
    assert [path.name for path in own_shm.iterdir()] == [region.segment.key]
    assert (row.split()[0], summary) == (dead.name, "1 removed")


def test_a_server_tells_under_which_names_a_region_is_registered(region: ManagedRegion, told: Told) -> None:
    names = {"first": f"/{region.segment.key}", "second": region.segment.key, "other": "/other"}
    answer = [{"name": name, "key": key, "offset": 0, "byte_size": 100} for name, key in names.items()]
    with telling_registrations(answer) as url:
        assert line_of(region, told("--url", url)).endswith(" first, second")
        found = object_with(told("--json", "--url", url), key=region.segment.key)
    assert found["registered_as"] == ["first", "second"]


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1", "127.0.0.1:1", "localhost"])
def test_without_an_answer_nothing_is_reaped(dead: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions", "--reap", "--url", wrong]) == 1
    output = capsys.readouterr()
    why = f"{wrong}: the server's HTTP endpoint, which lists registered regions, does not answer"
    assert (output.err.startswith(why), output.out) == (True, "")
    assert dead.exists()


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--reap"]])
def test_a_dev_shm_that_cannot_be_read_is_not_an_empty_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shm").touch()
    monkeypatch.setattr(regions, "DEV_SHM", tmp_path / "shm")
    assert cli.main(["regions", *arguments]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"{tmp_path / 'shm'} cannot be read, so its regions are unknown: Not a directory\n"


@pytest.mark.parametrize("name", ["shmbu-\x1b[31mred", "shmbu-two\nlines", "shmbu-\u202ebackwards", "shmbu-\udcff"])
def test_names_command_no_terminal(own_shm: Path, name: str, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    (own_shm / name).write_bytes(region_bytes())
    (own_shm / f"{POOL}\x1b[31mred").touch()
    registered = {f"{name} as": Registration(f"/{name}", 0, len(region_bytes()))}
    monkeypatch.setattr(regions, "fetch_registrations", lambda url: registered)
    output = told("--url", "http://localhost")
    assert output.replace("\n", "").isprintable()
    assert output.count(repr(name)[1:-1]) == 2
    assert "\\x1b[31mred" in output.partition(POOL)[2]


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
@pytest.mark.parametrize("line", ["0-1000 r 0 0:1 1 ", "0-1 r 0 ffffffffffff:ffffffffffff 1 "])
def test_a_file_whose_name_seems_to_be_a_line_of_its_own(odd: str, line: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a{odd}{line}" / "dev" / "shm"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(4096))
    before = {each.identity for each in look_into_processes().found[0].mapped}
    with (folder / "x").open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        (found,) = look_into_processes().found
    assert {each.identity for each in found.mapped} == before


HOLDING = """
import mmap, sys
mapped = mmap.mmap(int(sys.argv[1]), 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sealed() -> Iterator[ManagedRegion]:
    sealed = ManagedRegion.create(100, slot_count=3, kind=RegionKind.SEALED)
    yield sealed
    sealed.close()


@contextlib.contextmanager
def holding(sealed: ManagedRegion, proc: Path) -> Iterator[int]:
    fd = os.open(f"/proc/self/fd/{sealed.segment.fileno()}", os.O_RDWR | os.O_CLOEXEC)
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


def find_sealed_memory() -> Search:
    return shared_memory.sealed_memory_of(look_into_processes())


def inode(sealed: ManagedRegion) -> int:
    return sealed.segment.identity[1]


def test_every_process_that_has_it_is_named_once_and_its_holders_keep_it(sealed: ManagedRegion, proc: Path) -> None:
    number = inode(sealed)

    def found() -> SealedMemory:
        (memory,) = [each for each in find_sealed_memory().found if each.inode == number]
        return memory

    (proc / "7").mkdir()  # one that ends meanwhile
    with holding(sealed, proc) as pid:
        command = Path(f"/proc/{pid}/comm").read_text().strip()
        assert sorted(holder.pid for holder in found().holders) == sorted([os.getpid(), pid])
        assert Holder(pid, command) in found().holders
        assert find_sealed_memory().is_complete
        sealed.close()
        assert found().is_owner_alive is False
        assert pid in [holder.pid for holder in found().holders]


def test_what_is_mapped_alone_is_found_too(sealed: ManagedRegion, proc: Path, told: Told) -> None:
    """A result outlives its client's descriptors, and then nobody can be asked about the owner."""
    device = sealed.segment.identity[0]
    place = f"{os.major(device):02x}:{os.minor(device):02x} {inode(sealed)}"
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
    memory = SealedMemory(inode(sealed), 4 * mmap.PAGESIZE, holders=[Holder(77, "python3")])
    assert find_sealed_memory().found == [memory]
    assert str(inode(sealed)) in told()


def test_looking_leaves_everything_as_it_is(sealed: ManagedRegion) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    find_sealed_memory()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert not locks.is_owner_alive(sealed.segment.fileno())  # as seen by the description that has the lease


def test_processes_that_may_not_be_looked_into_are_told_of(
    sealed: ManagedRegion, proc: Path, monkeypatch: pytest.MonkeyPatch, told: Told
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
    rest = "processes that this user may not inspect may hold more"
    assert f"1 sealed, 0 with a dead owner; {rest}" in told()


def test_the_table_has_a_line_for_it_json_an_object_and_reaping_leaves_it(sealed: ManagedRegion, told: Told) -> None:
    assert told("--reap") == "0 removed\n"
    output = told()
    row = next(line for line in output.splitlines() if line.startswith(f"inode {inode(sealed)} "))
    assert all(each in row for each in (" 20 KiB ", " alive ", " 0/3 ", f" {os.getpid()} "))
    assert "SEALED MEMORY" in output
    assert sealed.lease(1).take()
    it = object_with(told("--json"), kind="sealed", inode=inode(sealed))
    assert it.pop("holders") == [{"pid": os.getpid(), "command": Path("/proc/self/comm").read_text().strip()}]
    assert it == of_both_kinds("sealed", sealed, slots_in_use=1) | {"inode": inode(sealed)}


FIND = "from shm_backend_utils.memory.shared_file import prefix_of_pools; print(prefix_of_pools())"
STUB = "/opt/tritonserver/backends/python/triton_python_backend_stub"


def found_by_a_stub(pool: str, program: str = STUB) -> str:
    """Return the prefix that a process finds which was started as the backend starts a stub."""
    # Python takes a script where a stub has its model, and then the pool's name.
    command = [program, "/dev/stdin", pool, "1048576", "1048576", "1", "/opt/backends", "336", "model"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # of which the other name tells nothing
    done = subprocess.run(
        command, executable=sys.executable, env=environment, input=FIND, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize("prefix", [USUAL_POOL_PREFIX, f"{USUAL_POOL_PREFIX}0123_", "mine_", "7", ""])
def test_a_stub_finds_what_comes_before_its_pools_uuid(prefix: str) -> None:
    assert found_by_a_stub(f"{prefix}{uuid.uuid4()}") == prefix


def test_old_releases_count_and_who_is_no_stub_or_was_told_something_else_takes_the_usual_one() -> None:
    assert found_by_a_stub("mine_12") == "mine_"
    assert prefix_of_pools() == USUAL_POOL_PREFIX
    assert found_by_a_stub(f"mine_{uuid.uuid4()}", program="/usr/bin/python3") == USUAL_POOL_PREFIX
    assert found_by_a_stub("what is that") == USUAL_POOL_PREFIX


def test_what_only_begins_alike_is_no_pool_unless_it_begins_as_usual() -> None:
    assert is_pool(f"mine_{uuid.uuid4()}", "mine_")
    assert not is_pool("mine_other", "mine_")
    assert not is_pool(f"other_{uuid.uuid4()}", "mine_")
    assert is_pool(f"{USUAL_POOL_PREFIX}whatever", "mine_")


@pytest.fixture
def pool(own_shm: Path) -> Path:
    path = own_shm / POOL
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_a_pool_that_nobody_has_mapped_is_named_and_never_removed(pool: Path, told: Told) -> None:
    *_, row, summary = told().splitlines()
    assert row.split()[:3] == [POOL, "4", "KiB"]
    assert row.endswith("  no process")
    assert summary.startswith("pools of Triton's Python backend: 1, 1 not mapped by any process here; if no server")
    assert (told("--reap"), pool.exists()) == ("0 removed\n", True)


def test_a_pool_that_is_in_use_is_only_counted(pool: Path, told: Told) -> None:
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        output = told()
        found = object_with(told("--json"), kind="pool")
    assert POOL not in output
    assert output.splitlines()[-1] == "pools of Triton's Python backend: 1, 0 not mapped by any process here"
    of_the_file = {"key": POOL, "byte_size": mmap.PAGESIZE, "uid": os.geteuid()}
    assert found == {"kind": "pool", **of_the_file, "pids": [os.getpid()], "is_left_behind": False}


def test_a_pool_is_a_file_and_as_large_as_its_memory(own_shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_shm / f"{POOL}3").mkdir()
    (own_shm / f"{POOL}4").symlink_to("/dev/null")
    os.mkfifo(own_shm / f"{POOL}5")
    assert find_pools() == []
    with (own_shm / POOL).open("wb") as file:
        file.truncate(2**30)
    assert [found.byte_size for found in find_pools()] == [0]
    monkeypatch.setattr(shared_memory, "DEV_SHM", own_shm / "nothing")
    assert shared_memory.with_users(find_pools(), look_into_processes()) == []
