"""Ports for a server that comes back on the same ones."""

from __future__ import annotations

import random
import socket

from shm_backend_utils.server import Ports

__all__ = ["free_ports"]

# Ephemeral ports begin above. A client that dials a port of that range where nobody listens may be given that very
# port, so connect to itself, and keep the server from coming back.
RANGE = range(10_000, 30_000)


def free_ports() -> Ports:
    """Return three that are free, and that no outgoing connection will be given."""
    found: list[int] = []
    while len(found) < 3:
        port = random.choice(RANGE)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return Ports(*found)
