"""Give a model's processes a processor core of their own, so that their caches are not somebody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shm_backend_utils.server import EmbeddedServer

__all__ = ["models_on_a_core_of_their_own"]


@contextmanager
def models_on_a_core_of_their_own(server: EmbeddedServer) -> Iterator[None]:
    """Keep the server's stub processes on one core, and the server and this process off it. Needs two cores."""
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    stubs = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    others = [server.pid, os.getpid()]
    try:
        for pid in stubs:
            _pin(pid, {core})
        for pid in others:
            _pin(pid, everywhere - {core} or everywhere)
        yield
    finally:
        for pid in [*stubs, *others]:
            _pin(pid, everywhere)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
