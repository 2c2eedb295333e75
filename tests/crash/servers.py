"""Servers of a test's own, with more options than those that every server is started with."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from shm_backend_utils.server import EmbeddedServer, Installation, install

ONCE: Final = "--disable-auto-complete-config"  # Triton starts each stub twice otherwise, to ask what is complete


def installation_with(options: Sequence[str], folder: Path) -> Installation:
    """Return an installation in a new folder whose server gets these options beside those that it is given."""
    real = install()
    wrapped = Installation(folder, real.triton)
    wrapped.binary.parent.mkdir(parents=True)
    (folder / "lib").symlink_to(real.folder / "lib")
    wrapped.backends.symlink_to(real.backends)
    wrapped.binary.write_text(f'#!/bin/sh\nexec {shlex.quote(str(real.binary))} "$@" {shlex.join(options)}\n')
    wrapped.binary.chmod(0o755)
    return wrapped


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
