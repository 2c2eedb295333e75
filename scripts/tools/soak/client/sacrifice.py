"""A client of the soak that does to its own memory what no client should. It may not survive."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import PreparedCall, ShmClient
from shm_backend_utils.errors import PeerError, ShmError
from shm_backend_utils.memory.handover.server import HandoverServer
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.sealed import LINK
from shm_backend_utils.memory.shared_file import DEV_SHM

LENGTH: Final = 1 << 18
ATTEMPTS: Final = 5
HEADER_AND_RECORD: Final = 2 * 4096
IN_DEV_SHM: Final = ("truncate between requests", "truncate in flight", "truncate everything", "ask for memory")


def own_region() -> Path:
    """Return the only region of this process."""
    (path,) = DEV_SHM.glob(f"shmbu-{os.getpid()}-*")
    return path


def punch_holes() -> None:
    """Give back all memory of the own sealed region, but for its header and record."""
    links = [fd for fd in os.listdir("/proc/self/fd") if link_of(fd) == LINK]  # noqa: PTH208
    fd = os.open(f"/proc/self/fd/{links[0]}", os.O_RDWR)
    with mmap.mmap(fd, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, HEADER_AND_RECORD, len(mapped) - HEADER_AND_RECORD)
    os.close(fd)


def link_of(fd: str) -> str:
    """Return what a descriptor refers to; nothing if it is closed by now."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    return ""


def die_at_handing_over(deed: str) -> None:
    """Have this process' handover server kill it, before or after it hands over a region that a model fetches."""
    answer = HandoverServer._answer

    def answer_and_die(server: HandoverServer, connection: Any, question: Any) -> None:
        if deed == "die after handing over":
            answer(server, connection, question)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(HandoverServer, "_answer", answer_and_die)  # noqa: B010  # mypy knows no such thing


def infer_until_answered(call: PreparedCall) -> None:
    """Infer, also if that is the request by which Triton learns that the stub was killed before."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(PeerError):
            call.infer().release()
            return


def commit(deed: str, url: str) -> str:
    """Do the deed; return what came of it."""
    try:
        pool = PoolOptions(region="system" if deed in IN_DEV_SHM else "sealed")
        with ShmClient(url, timeout_s=20, path="direct", pool=pool) as client:
            if deed.startswith("die"):
                client.explain("halves")  # it tries sealed memory
                die_at_handing_over(deed)
            shape = {"X": ((LENGTH,), np.uint32)}
            sleep_ms = 400 if deed == "truncate in flight" else 0
            with client.prepare("halves", shape, outputs={"Y": 4 * LENGTH}, parameters={"sleep_ms": sleep_ms}) as call:
                infer_until_answered(call)
                if deed == "truncate between requests":
                    os.truncate(own_region(), HEADER_AND_RECORD)
                if deed == "punch holes":
                    punch_holes()
                if deed == "truncate everything":
                    os.truncate(own_region(), 0)
                if deed == "truncate in flight":
                    threading.Timer(0.2, os.truncate, (own_region(), HEADER_AND_RECORD)).start()
                call.infer().release()
    except ShmError as error:
        status = getattr(error, "status", lambda: None)()
        return f"{type(error).__name__} {status or ''}".strip()
    return "answered"


if __name__ == "__main__":
    print(commit(*sys.argv[1:]), flush=True)
