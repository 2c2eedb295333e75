"""The bench's server: two sample models and the bench's own, on any core or on one that nobody else uses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in, temporary_server
from shm_backend_utils.server import EmbeddedServer

_MODELS: Final = Path(__file__).resolve().parent / "models"
_SAMPLE_MODELS: Final = ("identity", "multiply")
_CODE: Final = {"timed_identity_8": "timed_identity", "trusting_identity": "identity"}
"""Models that are another one with another configuration. No links: archives do not carry those to folders."""


def bench_server() -> AbstractContextManager[EmbeddedServer]:
    """Start a server with those models, for as long as a block."""
    models = [*(REPOSITORY / name for name in _SAMPLE_MODELS), *models_in(_MODELS)]

    def provide(folder: Path) -> Path:
        copy_models(models, folder)
        for model, other in _CODE.items():
            shutil.copytree(folder / other / "1", folder / model / "1")
        shutil.copy(folder / "multiply/1/model.py", folder / "counted_multiply/1/multiply.py")
        return folder

    return temporary_server("bench", provide, numpy="own")


def stubs_of(server: EmbeddedServer) -> list[int]:
    """Return the processes that execute the server's models."""
    threads = Path(f"/proc/{server.pid}/task").iterdir()
    return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


@contextmanager
def models_on_a_core_of_their_own(server: EmbeddedServer) -> Iterator[None]:
    """Keep the server's stub processes on one core, and the server and this process off it. Needs two cores.

    The models' caches are nobody else's then.
    """
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    stubs = stubs_of(server)
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
