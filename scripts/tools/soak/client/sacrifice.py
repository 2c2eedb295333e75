"""A client of the soak that does to its own memory what no client should. It may not survive."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Final

import numpy as np

from shm_backend_utils.client import PreparedCall, ShmClient
from shm_backend_utils.errors import PeerError, ShmError

from ..machine import SHM

LENGTH: Final = 1 << 18
ATTEMPTS: Final = 5
HEADER_AND_RECORD: Final = 2 * 4096
DEEDS: Final = ("truncate between requests", "truncate in flight", "truncate everything", "ask for memory")


def own_region() -> Path:
    """Return the only region of this process."""
    (path,) = SHM.glob(f"shmbu-{os.getpid()}-*")
    return path


def infer_until_answered(call: PreparedCall) -> None:
    """Infer, also if that is the request by which Triton learns that the stub was killed before."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(PeerError):
            call.infer().release()
            return


def commit(deed: str, url: str) -> str:
    """Do the deed; return what came of it."""
    try:
        with ShmClient(url, timeout_s=20, path="direct") as client:
            shape = {"X": ((LENGTH,), np.uint32)}
            sleep_ms = 400 if deed == "truncate in flight" else 0
            with client.prepare("halves", shape, outputs={"Y": 4 * LENGTH}, parameters={"sleep_ms": sleep_ms}) as call:
                infer_until_answered(call)
                if deed == "truncate between requests":
                    os.truncate(own_region(), HEADER_AND_RECORD)
                if deed == "truncate everything":
                    os.truncate(own_region(), 0)
                if deed == "truncate in flight":
                    threading.Timer(0.2, os.truncate, (own_region(), HEADER_AND_RECORD)).start()
                call.infer().release()
    except ShmError as error:
        status = getattr(error, "status", lambda: None)()
        return f"{type(error).__name__} {status or ''}".strip()
    return "answered"


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("url")
    arguments = parser.parse_args()
    print(commit(arguments.deed, arguments.url), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
