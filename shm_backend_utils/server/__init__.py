"""The embedded tritonserver: install, launch, wait until ready, stop. For demos, tests and development machines."""

from __future__ import annotations

from .install import Installation, install
from .launch import EmbeddedServer, Ports, StubNumpy
from .preflight import GpuFinding, find_gpus

__all__ = ["EmbeddedServer", "GpuFinding", "Installation", "Ports", "StubNumpy", "find_gpus", "install"]
