"""A server that is killed, and comes back on the same ports."""

from __future__ import annotations

import os
import random
import signal
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ...server import EmbeddedServer, Ports

__all__ = ["MortalServer", "free_ports"]

# Ephemeral ports begin above. A client that dials a port of that range where nobody listens may be given that very
# port, so connect to itself, and keep the server from coming back.
_RANGE: Final = range(10_000, 30_000)


class MortalServer:
    """A server that can be killed and started again. A context manager: at its end the server is killed.

    Parameters
    ----------
    model_repository : pathlib.Path
        Folder of models.
    **options
        As of :meth:`.EmbeddedServer.start`, but for the ports, which are chosen once.

    Attributes
    ----------
    server : EmbeddedServer
        The one that runs, or ran last.
    """

    def __init__(self, model_repository: Path, **options: Any) -> None:
        self._models = model_repository
        self._options = options
        self._ports = free_ports()
        self.server = self._start()

    def kill(self) -> None:
        """Kill it, and all that it has started (SIGKILL). Its registrations are lost."""
        if self.server.is_running:
            os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def come_back(self) -> None:
        """Start it again, and return when it is ready."""
        self.server = self._start()

    def __enter__(self) -> MortalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self) -> EmbeddedServer:
        return EmbeddedServer.start(self._models, ports=self._ports, **self._options)


def free_ports() -> Ports:
    """Return three that are free, and that no outgoing connection will be given."""
    found: list[int] = []
    while len(found) < 3:
        port = random.choice(_RANGE)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return Ports(*found)
