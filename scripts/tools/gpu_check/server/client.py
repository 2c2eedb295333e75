"""A real server with the models of the check, and clients of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as grpcclient

from shm_backend_utils.cli.common.server import temporary_server
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

from ..gpu import Gpu
from .repository import work_model, write_repository

__all__ = ["ServerCheck", "ServerClient", "clients_of", "running_server"]


@dataclass(frozen=True)
class ServerClient:
    """Calls of the check.

    Attributes
    ----------
    gpu : Gpu
        This process', with one library.
    shm : ShmClient
    bare : tritonclient.grpc.InferenceServerClient
    after_server : contextlib.ExitStack
        Closed when the server has ended. What is registered there by its handle is freed then, as Triton unmaps some
        time after it has been told to.
    """

    gpu: Gpu
    shm: ShmClient
    bare: Any
    after_server: contextlib.ExitStack

    def model(self, work: str) -> str:
        """Return the name of the model that does this work by this client's library."""
        return work_model(work, self.gpu.kernels.name)

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
def running_server(gpus: Sequence[Gpu], installation: Installation) -> Iterator[EmbeddedServer]:
    """Run a server as long as the block, with models that work by the libraries of all these."""
    libraries = [gpu.kernels.name for gpu in gpus]
    models = functools.partial(write_repository, libraries=libraries, is_fake=gpus[0].is_fake)
    with temporary_server("gpu-check", models, installation=installation, numpy="own") as server:
        yield server


@contextlib.contextmanager
def clients_of(server: EmbeddedServer, gpus: Sequence[Gpu]) -> Iterator[list[ServerClient]]:
    """Make a client with each of these; stop the server in the end."""
    with contextlib.ExitStack() as stack:
        after_server = stack.enter_context(contextlib.ExitStack())
        bare = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        shm = [stack.enter_context(ShmClient(server.grpc_url, cuda=gpu.access)) for gpu in gpus]
        yield [ServerClient(gpu, each, bare, after_server) for gpu, each in zip(gpus, shm, strict=True)]
        server.stop()  # no model has the clients' memory mapped then: they free it when they are closed
