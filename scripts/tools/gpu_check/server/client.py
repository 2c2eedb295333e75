"""A real server with the models of the check, and clients of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as grpcclient

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import Installation

from ...common.server import temporary_server
from ..gpu import Gpu
from .repository import write_repository

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
    models = functools.partial(write_repository, is_fake=gpu.is_fake)
    with (
        temporary_server("gpu-check", models, installation=installation, numpy="own") as server,
        ShmClient(server.grpc_url, cuda=gpu.access) as shm,
        grpcclient.InferenceServerClient(server.grpc_url) as bare,
    ):
        yield ServerClient(gpu, shm, bare)
        server.stop()  # no model has the client's memory mapped then: the client frees it when it is closed
