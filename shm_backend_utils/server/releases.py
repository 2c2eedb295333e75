"""Which servers can be installed: the oldest and the newest wheel of ``nvidia-pytriton`` that are tested."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..errors import MachineError

__all__ = ["DEFAULT", "RELEASES", "VERSION_VARIABLE", "Release", "find_release"]

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


RELEASES: Final[Mapping[str, Release]] = MappingProxyType(
    {
        release.version: release
        for release in (
            Release(
                "0.5.0",
                "2.41.0",
                frozenset(
                    {
                        "f46a3c03fb0893948f57c1d5470998a6f403f2c8036d7af944c817a8fba31a46",  # x86_64
                        "edac1a01b71cbdf9872c3d29ecbfc8d44cb5522059eaf0c64495913f4326f8ac",  # aarch64
                    }
                ),
            ),
            Release(
                "0.7.0",
                "2.51.0",
                frozenset(
                    {
                        "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",  # x86_64
                        "f99e07ee56fe065337453956afba17d2673e02ec6a632c3de26ce6e7b32a0898",  # aarch64
                    }
                ),
            ),
        )
    }
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
