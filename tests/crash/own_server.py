"""A server of a test's own, for tests that kill what others need. It is killed at the end, and not asked to stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from shm_backend_utils.server import EmbeddedServer

from .server_options import ONCE, installation_with

__all__ = ["serving"]

MODELS = Path(__file__).resolve().parents[1] / "models"


@contextlib.contextmanager
def serving(models: Mapping[str, str], folder: Path, replace: tuple[str, str] = ("", "")) -> Iterator[EmbeddedServer]:
    """Run a server with copies of test models, by the names that they get; ``replace`` changes their configurations."""
    for name, original in models.items():
        target = folder / "models" / name
        shutil.copytree(MODELS / original, target, ignore=shutil.ignore_patterns("__pycache__"))
        config = target / "config.pbtxt"
        text = config.read_text().replace(f'name: "{original}"\n', "")
        config.write_text(text.replace(*replace) if replace[0] else text)
    installation = installation_with([ONCE], folder / "installation")
    with EmbeddedServer.start(folder / "models", installation=installation, log_file=folder / "server.log") as server:
        yield server
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
