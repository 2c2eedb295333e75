"""A server for the models of the pages: each page's are there as long as its programs run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from shm_backend_utils.server import EmbeddedServer
from tests.crash.servers import installation_with

from .documents import ROOT

SAMPLES = ROOT / "model_repository"


class PagesServer:
    """A server that loads models when it is told to, with the NumPy that every model works with."""

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"
        self._models.mkdir()
        installation = installation_with(["--model-control-mode=explicit"], folder / "installation")
        self._server = EmbeddedServer.start(self._models, installation=installation, log_file=folder / "server.log")
        self._client: Any = tritonclient.grpc.InferenceServerClient(self._server.grpc_url)

    @contextmanager
    def serving(self, models: Path, code: str) -> Iterator[None]:
        """Serve the models in a folder, and the sample models that code names and that are not there."""
        models.mkdir(exist_ok=True)
        for sample in SAMPLES.iterdir():
            ours = models / sample.name
            if ours.exists() and not (ours / "config.pbtxt").exists() and "auto_complete" not in code:
                shutil.copy(sample / "config.pbtxt", ours)
            if f'"{sample.name}"' in code and not ours.exists():
                shutil.copytree(sample, ours, ignore=shutil.ignore_patterns("__pycache__"))
        names = sorted(model.name for model in models.iterdir())
        for name in names:
            shutil.copytree(models / name, self._models / name)
            self._client.load_model(name)
        try:
            yield
        finally:
            for name in names:
                self._client.unload_model(name)
                shutil.rmtree(self._models / name)

    def addressed(self, code: str) -> str:
        """Return code in which the addresses of a server on the usual ports are this one's."""
        usual = {"localhost:8000": self._server.http_url, "localhost:8001": self._server.grpc_url}
        for address, here in usual.items():
            code = code.replace(address, here.removeprefix("http://"))
        return code

    def stop(self) -> None:
        self._client.close()
        self._server.stop()


@pytest.fixture(scope="session")
def pages_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesServer]:
    """A server that serves the models of one page after another."""
    server = PagesServer(tmp_path_factory.mktemp("pages"))
    yield server
    server.stop()
