"""Build the distributions so that everybody who builds the same commit gets the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

__all__ = ["BuildError", "build", "export", "unpack"]


class BuildError(Exception):
    """The distributions cannot be built, or are not as they must be; the message is a line or two."""


def export(repository: Path, folder: Path) -> str:
    """Lay out what is committed in a folder, and return the time of the commit, in seconds since 1970."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=repository, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "--extract", "--no-same-permissions", "--directory", str(folder)], input=archive, check=True)
    return _told(["git", "log", "-1", "--format=%ct"], repository).strip()


def build(source: Path, folder: Path, targets: tuple[str, ...], seconds: str, umask: int = 0o022) -> list[Path]:
    """Build distributions out of a folder, and return their files.

    Parameters
    ----------
    source : pathlib.Path
        A checkout, or what a source distribution holds.
    folder : pathlib.Path
        Where to put them.
    targets : tuple of str
        Of ``sdist`` and ``wheel``.
    seconds : str
        The time that their files get, since 1970.
    umask : int
        That of the process that builds; it makes no difference.

    Raises
    ------
    BuildError
        With what the builder had to say.
    """
    options = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    done = subprocess.run(
        command, cwd=source, env=environment, umask=umask, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"the distributions cannot be built: {(done.stderr or done.stdout).strip()}")
    return sorted(folder.iterdir())


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution, and return the folder in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def _told(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
