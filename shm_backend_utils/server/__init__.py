"""The embedded tritonserver: install, launch, wait until ready, stop. For demos, tests and development machines."""

from __future__ import annotations

from .install import install
from .installation import Installation
from .launch import EmbeddedServer, Ports, StubNumpy
from .preflight import GpuFinding, find_gpus
from .wheels import RELEASES, Release, find_release

__all__ = [
    "RELEASES",
    "EmbeddedServer",
    "GpuFinding",
    "Installation",
    "Ports",
    "Release",
    "StubNumpy",
    "find_gpus",
    "find_release",
    "install",
]
