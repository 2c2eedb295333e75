"""A server that is the crash tests' own: once a stub was killed, a server that is asked to stop waits half a minute."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.cli.common.sample_models import copy_models
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.faults.servers import MortalServer

from .gate import Gate

ROOT = Path(__file__).resolve().parents[2]
MODELS = (ROOT / "model_repository" / "identity", ROOT / "tests" / "models" / "crash_stages")


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_models(MODELS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(models, log_file=tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="package")
def mortal(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    """One that tests may kill, if they have it come back."""
    with MortalServer(models, log_file=tmp_path_factory.mktemp("mortal") / "server.log") as mortal:
        yield mortal


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)
