"""Servers with more options than those that every server is started with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shm_backend_utils.server import Installation, install

__all__ = ["ONCE", "installation_with"]

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
