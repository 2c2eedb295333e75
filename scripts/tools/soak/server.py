"""The soak's server: it comes back on the same ports, and its models' stubs can be found."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import EmbeddedServer, Ports

from ..common.processes import children, command_line
from ..common.sample_models import REPOSITORY, copy_models, models_in
from .client.tally import Tally
from .machine import SHM, free_ports, held_shared_memory

__all__ = ["SoakServer"]

OWN_MODELS: Final = Path(__file__).resolve().parent / "models"
SAMPLE_MODELS: Final = ("identity", "multiply")
START_ATTEMPTS: Final = 3


class SoakServer:
    """An embedded server that is killed and started again.

    Attributes
    ----------
    grpc_url, http_url : str
        As for ShmClient; the same for every start.
    """

    def __init__(self, folder: Path, chance: random.Random, tally: Tally) -> None:
        self._folder = folder
        self._tally = tally
        self._prefixes: list[str] = []
        copy_models([*models_in(OWN_MODELS), *(REPOSITORY / name for name in SAMPLE_MODELS)], folder / "models")
        self._ports = Ports(*free_ports(chance, 3))
        self._server = self._start()
        self.grpc_url = self._server.grpc_url
        self.http_url = f"http://{self._server.http_url}"

    @property
    def is_running(self) -> bool:
        """Whether it has not exited."""
        return self._server.is_running

    @property
    def pid(self) -> int:
        """Of the tritonserver."""
        return self._server.pid

    def stubs(self, model: str = "") -> list[int]:
        """Return the processes that execute a model, or any model."""
        word = f"/models/{model}/" if model else "/models/"
        return [pid for pid in children(self.pid) if word in command_line(pid)]

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self._server = self._start()

    def kill(self) -> None:
        """Kill it, and count what its log tells.

        A server that was asked to stop would wait for its own timeout, half a minute, once a stub of it was killed.
        """
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)
            self._server.wait()
        self._server.stop()
        log = self._server.log_file.read_text(errors="replace")
        for reason in re.findall(r"soak refused: ([^\"\n]*)", log):
            self._tally.add("refused by the model", reason)

    def held_by_stubs(self) -> list[str]:
        """Return what the stubs hold of clients' regions."""
        return [f"{command_line(pid)}: {held}" for pid in self.stubs() for held in held_shared_memory(pid, "shmbu-")]

    def left_behind(self) -> list[str]:
        """Return the shared memory of the Python backend that outlived its server."""
        return [path.name for prefix in self._prefixes for path in SHM.glob(f"{prefix}*")]

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._server.log_tail()

    def _start(self) -> EmbeddedServer:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                server = EmbeddedServer.start(
                    self._folder / "models", ports=self._ports, log_file=self._folder / "server.log"
                )
            except MachineError as error:
                if attempt == START_ATTEMPTS:
                    raise
                self._tally.add_error(error, "server starts that failed")
            else:
                self._prefixes.append(server.shm_prefix)
                return server
        raise AssertionError("unreachable")
