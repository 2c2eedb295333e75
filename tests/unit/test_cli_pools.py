"""``shm-backend-utils regions`` tells of what a killed server has left of the Python backend's own memory."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli.shared_memory import pools, processes
from shm_backend_utils.cli.shared_memory.pools import find_pool_files, pools_of
from shm_backend_utils.cli.shared_memory.processes import look_into_processes
from shm_backend_utils.memory import reaper

NAME = "triton_python_backend_shm_region_0123"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm, and this process alone."""
    folder = Path(tempfile.mkdtemp(prefix="pools-", dir="/dev/shm"))
    (folder / "processes").mkdir()
    (folder / "processes" / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    for module in (pools, reaper):
        monkeypatch.setattr(module, "DEV_SHM", folder)
    monkeypatch.setattr(processes, "_PROC", folder / "processes")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def pool(folder: Path) -> Path:
    """A pool of a page, made as the backend makes it."""
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
    assert capsys.readouterr().out == "0 removed\n"
    assert pool.exists()


def test_its_size_is_what_it_takes_not_what_it_may_take(folder: Path) -> None:
    with (folder / NAME).open("wb") as file:
        file.truncate(2**30)
    (found,) = find_pool_files()
    assert found.byte_size == 0


def test_what_is_no_file_is_none(folder: Path) -> None:
    (folder / NAME).mkdir()
    (folder / f"{NAME}4").symlink_to("/dev/null")
    os.mkfifo(folder / f"{NAME}5")
    assert find_pool_files() == []


def test_a_name_with_what_a_terminal_obeys_is_printed_without(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / f"{NAME}\x1b[31mred").touch()
    cli.main(["regions"])
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert "\\x1b[31mred" in output


def test_no_dev_shm_has_no_pools(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "DEV_SHM", folder / "nothing")
    assert pools_of(find_pool_files(), look_into_processes()) == []
