"""A server that is the crash tests' own: once a stub was killed, a server that is asked to stop waits half a minute."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.faults.at_hand import MortalServer

from .servers import ONCE, installation_with

ROOT = Path(__file__).resolve().parents[2]
MODELS = (ROOT / "model_repository" / "identity", ROOT / "tests" / "models" / "crash_stages")


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_models(MODELS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("server")
    return {"installation": installation_with([ONCE], folder / "installation"), "log_file": folder / "server.log"}


@pytest.fixture(scope="package")
def server(models: Path, options: dict[str, Any]) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(models, **options) as server:
        yield server
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="package")
def mortal(models: Path, options: dict[str, Any]) -> Iterator[MortalServer]:
    """One that tests may kill, if they have it come back."""
    with MortalServer(models, **options | {"log_file": options["log_file"].with_name("mortal.log")}) as mortal:
        yield mortal


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(server.grpc_url, timeout_s=60) as client:
        yield client
