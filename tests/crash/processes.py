"""The processes of others: which stub executes a model, what it holds of shared memory, and what regions there are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.tools.processes import children, command_line, mappings
from shm_backend_utils.client import PreparedCall, Result
from shm_backend_utils.errors import MachineError, PeerError
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.reaper import RegionReport
from shm_backend_utils.server import EmbeddedServer

from ..e2e.eventually import DEADLINE_S


@contextlib.contextmanager
def standing(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program as far as it says that it is here; it is killed at the end, if it was not before."""
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def infer_until_answered(call: PreparedCall) -> Result:
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


def living_stub_of(server: EmbeddedServer, model: str) -> int:
    stub = stub_of(server, model)
    assert stub is not None
    return stub


def kill_stub(server: EmbeddedServer, model: str) -> None:
    os.kill(living_stub_of(server, model), signal.SIGKILL)


def regions_of(owner: int) -> frozenset[str]:
    """Return the regions that a client has, as the kernel knows them: sealed ones have no names."""
    return frozenset([*map(_known, Path("/dev/shm").glob(f"shmbu-{owner}-*")), *_mapped(owner)])


def held_regions(pid: int, regions: frozenset[str]) -> list[str]:
    """Return what a process holds of these regions: of each, as often as it is mapped there, or open."""
    return [each for each in [*_mapped(pid), *_open(pid)] if each in regions]


@contextlib.contextmanager
def open_region_of(owner: int) -> Iterator[int]:
    """Hold the only region of a client open, whatever becomes of it; yields the descriptor."""
    named = list(Path("/dev/shm").glob(f"shmbu-{owner}-*"))
    sealed = [link for link in Path(f"/proc/{owner}/fd").iterdir() if _is_region(str(link.readlink()))]
    fd = os.open([*named, *sealed][0], os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def region_of(owner: int) -> RegionReport | None:
    """Return the region in /dev/shm of a client that has one or none."""
    found = [report for report in reaper.scan() if report.key.startswith(f"shmbu-{owner}-")]
    assert len(found) < 2
    return found[0] if found else None


def _is_region(name: str) -> bool:
    return name.startswith(("/dev/shm/shmbu-", "/memfd:shmbu "))


def _mapped(pid: int) -> list[str]:
    lines = [line.split(maxsplit=5) for line in mappings(pid)]
    return [f"{device} {inode}" for _, _, _, device, inode, *name in lines if name and _is_region(name[0])]


def _open(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was closed meanwhile
                if _is_region(str(link.readlink())):
                    found.append(_known(link))
    return found


def _known(file: Path) -> str:
    status = file.stat()
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"
