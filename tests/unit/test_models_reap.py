"""A model that is loaded removes what killed models of the same user have left in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.memory import reaper
from tests.unit.sessions import session_of, tensor

# What a model's process has that forwards requests: a pool, and a region in use.
FORWARDING = """
import sys
from pathlib import Path
from shm_backend_utils.memory import segment, shared_file
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.pool import SlotPool
segment.DEV_SHM = shared_file.DEV_SHM = Path(sys.argv[1])
pool = SlotPool(PoolOptions())
region, memory = pool.redeem(pool.request(Need(100), "forward"))
print(region.key, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm for this test alone: other processes reap in /dev/shm itself."""
    folder = Path(tempfile.mkdtemp(prefix="reaper-", dir="/dev/shm"))
    monkeypatch.setattr(reaper, "DEV_SHM", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def left(folder: Path) -> Path:
    """A region that a killed process has left."""
    with subprocess.Popen(
        [sys.executable, "-c", FORWARDING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = folder / process.stdout.readline().strip()
        process.kill()
    assert path.exists()
    return path


def load(monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(monkeypatch, [tensor("IN")], [tensor("OUT")]):
        pass


def test_a_model_that_loads_removes_what_a_killed_model_has_left(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch)
    assert not left.exists()


def test_a_model_loads_where_nothing_can_be_removed(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    load(monkeypatch)
    assert left.exists()


def test_a_model_loads_where_there_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reaper, "DEV_SHM", tmp_path / "nowhere")
    load(monkeypatch)
