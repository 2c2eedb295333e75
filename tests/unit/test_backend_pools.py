"""The Python backend's own pools of shared memory: their names, and the command that tells which were left behind."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli import shared_memory
from shm_backend_utils.cli.shared_memory import find_pool_files, look_into_processes, pools_of
from shm_backend_utils.memory.backend_pools import USUAL_PREFIX, is_pool, prefix_of_pools

FIND = "from shm_backend_utils.memory.backend_pools import prefix_of_pools; print(prefix_of_pools())"
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


@pytest.mark.parametrize("prefix", [USUAL_PREFIX, f"{USUAL_PREFIX}0123_", "mine_", "7", ""])
def test_a_stub_finds_what_comes_before_its_pools_uuid(prefix: str) -> None:
    assert found_by_a_stub(f"{prefix}{uuid.uuid4()}") == prefix
    if prefix == "mine_":
        assert found_by_a_stub("mine_12") == prefix, "old releases count"


def test_who_is_no_stub_or_was_told_something_else_takes_the_usual_one() -> None:
    assert prefix_of_pools() == USUAL_PREFIX
    assert found_by_a_stub(f"mine_{uuid.uuid4()}", program="/usr/bin/python3") == USUAL_PREFIX
    assert found_by_a_stub("what is that") == USUAL_PREFIX


def test_what_only_begins_alike_is_no_pool_unless_it_begins_as_usual() -> None:
    assert is_pool(f"mine_{uuid.uuid4()}", "mine_")
    assert not is_pool("mine_other", "mine_")
    assert not is_pool(f"other_{uuid.uuid4()}", "mine_")
    assert is_pool(f"{USUAL_PREFIX}whatever", "mine_")


# What `shm-backend-utils regions` tells of them


NAME = "triton_python_backend_shm_region_0123"


@pytest.fixture(autouse=True)
def folder(own_shm: Path, own_proc: Path) -> Path:
    (own_proc / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    return own_shm


@pytest.fixture
def pool(folder: Path) -> Path:
    path = folder / NAME
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_a_pool_that_nobody_has_mapped_is_named(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions"]) == 0
    *_, row, summary = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == [NAME, "4", "KiB"]
    assert row.endswith("  nobody")
    assert summary.startswith("1 pools of Triton's Python backend, 1 that nobody here has mapped; if no server")


def test_a_pool_that_is_in_use_is_only_counted(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert cli.main(["regions"]) == 0
        output = capsys.readouterr().out
        assert NAME not in output
        assert output.splitlines()[-1] == "1 pools of Triton's Python backend, 0 that nobody here has mapped"
        cli.main(["regions", "--json"])
        found = json.loads(capsys.readouterr().out)
    assert found.pop("age_s") >= 0
    assert found == {
        "kind": "pool",
        "key": NAME,
        "byte_size": mmap.PAGESIZE,
        "uid": os.geteuid(),
        "pids": [os.getpid()],
        "is_left_behind": False,
    }


def test_a_pool_is_never_removed(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions", "--reap"]) == 0
    assert (capsys.readouterr().out, pool.exists()) == ("0 removed\n", True)


def test_a_pool_is_a_file_and_as_large_as_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{NAME}3").mkdir()
    (folder / f"{NAME}4").symlink_to("/dev/null")
    os.mkfifo(folder / f"{NAME}5")
    assert find_pool_files() == []
    with (folder / NAME).open("wb") as file:
        file.truncate(2**30)
    assert [found.byte_size for found in find_pool_files()] == [0]
    monkeypatch.setattr(shared_memory, "DEV_SHM", folder / "nothing")
    assert pools_of(find_pool_files(), look_into_processes()) == []


def test_a_name_with_what_a_terminal_obeys_is_printed_without(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / f"{NAME}\x1b[31mred").touch()
    cli.main(["regions"])
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert "\\x1b[31mred" in output
