"""The processes of others: which stub executes a model, what it holds of shared memory, and what regions there are."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.tools.common.processes import children, command_line, mappings, open_files
from shm_backend_utils.client import PreparedCall, Result
from shm_backend_utils.errors import MachineError, PeerError
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.reaper import RegionReport
from shm_backend_utils.server import EmbeddedServer

__all__ = ["eventually", "held_regions", "infer_until_answered", "open_region_of", "region_of", "stub_of"]

DEADLINE_S = 40.0


def eventually(is_so: Callable[[], object]) -> None:
    """Return as soon as it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def infer_until_answered(call: PreparedCall) -> Result:
    """Infer until whoever was killed has come back."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call.infer()
        except (PeerError, MachineError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def stub_of(server: EmbeddedServer, model: str) -> int | None:
    """Return the process that executes a model's only instance; None while there is none."""
    return next((pid for pid in children(server.pid) if f"/{model}/1/model.py" in command_line(pid)), None)


def held_regions(pid: int, owner: int) -> list[str]:
    """Return the descriptors and mappings that a process holds of the regions of a client."""
    targets = [line.split(maxsplit=5)[-1] for line in mappings(pid)] + open_files(pid)
    return [target for target in targets if f"/shmbu-{owner}-" in target]


@contextlib.contextmanager
def open_region_of(owner: int) -> Iterator[int]:
    """Hold the only region of a client open, whatever becomes of its name; yields the descriptor."""
    (path,) = Path("/dev/shm").glob(f"shmbu-{owner}-*")
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def region_of(owner: int) -> RegionReport | None:
    """Return the region of a client that has one or none."""
    found = [report for report in reaper.scan() if report.key.startswith(f"shmbu-{owner}-")]
    assert len(found) < 2
    return found[0] if found else None
