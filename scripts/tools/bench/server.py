"""The bench's server: the sample models and the bench's own, on any core or on one that nobody else uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from shm_backend_utils.server import EmbeddedServer

from ..common.sample_models import copy_models, models_in, sample_models
from ..common.server import temporary_server

__all__ = ["bench_server", "models_on_a_core_of_their_own"]

_MODELS: Final = Path(__file__).resolve().parent / "models"


def bench_server() -> AbstractContextManager[EmbeddedServer]:
    """Start a server with the sample models and those of the bench, for as long as a block."""
    return temporary_server("bench", lambda folder: copy_models([*sample_models(), *models_in(_MODELS)], folder))


@contextmanager
def models_on_a_core_of_their_own(server: EmbeddedServer) -> Iterator[None]:
    """Keep the server's stub processes on one core, and the server and this process off it. Needs two cores.

    The models' caches are nobody else's then.
    """
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
