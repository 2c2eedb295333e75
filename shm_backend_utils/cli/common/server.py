"""A server that lasts as long as a block, with its models and its log in a folder that is removed then."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import MachineError
from ...server import EmbeddedServer, Installation, Ports, StubNumpy
from ..signals import undisturbed
from .sample_models import OTHER_FOLDER, copy_sample_models

__all__ = ["temporary_server"]


@contextmanager
def temporary_server(
    tool: str,
    provide_models: Callable[[Path], Path] = copy_sample_models,
    *,
    ports: Ports | None = None,
    installation: Installation | None = None,
    numpy: StubNumpy = "server",
) -> Iterator[EmbeddedServer]:
    """Start a server; the folder's name says which tool did, should it ever be left behind.

    ``provide_models`` takes a path to put models at, and returns where they are.
    """
    with _temporary_folder(tool) as name:
        folder = Path(name)
        models = provide_models(folder / "models")
        log_file = folder / "server.log"
        server = EmbeddedServer.start(models, ports=ports, installation=installation, log_file=log_file, numpy=numpy)
        try:
            yield server
        finally:
            with undisturbed():
                server.stop()


@contextmanager
def _temporary_folder(tool: str) -> Iterator[str]:
    try:
        folder = tempfile.mkdtemp(prefix=f"shm-backend-utils-{tool}-")
    except OSError as error:
        raise MachineError(f"no temporary folder can be made: {error.strerror or error}; {OTHER_FOLDER}") from None
    try:
        yield folder
    finally:
        with undisturbed():
            shutil.rmtree(folder)
