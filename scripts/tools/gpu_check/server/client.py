"""A real server with the models of the check, and clients of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from gpu_check_gpu import Gpu
from gpu_check_repository import write_repository

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

__all__ = ["ServerCheck", "ServerClient", "running_server"]


@dataclass(frozen=True)
class ServerClient:
    """Calls of the check.

    Attributes
    ----------
    gpu : Gpu
        This process'.
    shm : ShmClient
    bare : tritonclient.grpc.InferenceServerClient
    """

    gpu: Gpu
    shm: ShmClient
    bare: Any

    def infer_nothing(self) -> None:
        """Make an empty request, to a model without this library."""
        self.bare.infer("gpu_empty", [])

    def server_version(self) -> str:
        """Return what the server says."""
        version: str = self.bare.get_server_metadata().version
        return version


ServerCheck = Callable[[ServerClient], str]
"""Returns a detail for the report; raises what the report understands."""


@contextlib.contextmanager
def running_server(gpu: Gpu, installation: Installation) -> Iterator[ServerClient]:
    """Run a server as long as the block."""
    with tempfile.TemporaryDirectory(prefix="shm-backend-utils-gpu-check-") as folder:
        repository = write_repository(Path(folder) / "models", is_fake=gpu.is_fake)
        log_file = Path(folder) / "server.log"
        with (
            EmbeddedServer.start(repository, installation=installation, log_file=log_file) as server,
            ShmClient(server.grpc_url, cuda=gpu.access) as shm,
            grpcclient.InferenceServerClient(server.grpc_url) as bare,
        ):
            yield ServerClient(gpu, shm, bare)
            server.stop()  # no model has the client's memory mapped then: the client frees it when it is closed
