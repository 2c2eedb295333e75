"""A machine that has no shared memory and no processes but those of a test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.cli.shared_memory import pools, processes
from shm_backend_utils.cli.top import observer
from shm_backend_utils.memory import reaper, shared_file
from shm_backend_utils.memory import segment as system
from tests.unit.top.metrics_text import MetricsServer, metrics_server


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm that stands for it."""
    folder = Path(tempfile.mkdtemp(prefix="top-", dir="/dev/shm"))
    (folder / "processes").mkdir()
    for module in (pools, reaper, observer, system, shared_file):
        monkeypatch.setattr(module, "DEV_SHM", folder)
    monkeypatch.setattr(processes, "_PROC", folder / "processes")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """A metrics port of Triton's, without models that publish anything of this library's."""
    with metrics_server() as server:
        yield server
