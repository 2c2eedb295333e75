"""A client before its server, and what it asks of a server beside inference: over both protocols, in one shape."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.client import InferenceError, ServerUnavailableError
from shm_backend_utils.server import EmbeddedServer, Ports

from ..crash.servers import installation_with
from .eventually import eventually
from .flavours import FLAVOURS, AnyClient, AwaitedClient, Flavour

MODELS: Final = Path(__file__).resolve().parents[1] / "models"
X: Final = np.ones((1, 4), np.float32)
LONG_S: Final = 120.0


def asked(client: AnyClient, method: str, *values: Any, **named: Any) -> Any:
    if isinstance(client, AwaitedClient):
        return client.run(getattr(client.aio, method)(*values, **named))
    return getattr(client, method)(*values, **named)


def are_told_the_same(served: Served, method: str, *values: str) -> bool:
    first, *others = [asked(client, method, *values) for client in served.clients.values()]
    return others == [first] * 3


class Served:
    """A server that loads models when it is told to, and clients that were there before it."""

    def __init__(self, folder: Path, until: ExitStack) -> None:
        models, ports = folder / "models", Ports().resolve()
        copy_models([MODELS / name for name in ("rows", "countdown")], models)
        urls = {"grpc": f"localhost:{ports.grpc}", "http": f"http://localhost:{ports.http}"}
        flavours = {each: Flavour(urls[each.partition(" ")[0]], each.endswith("aio")) for each in FLAVOURS}
        with pytest.raises(ServerUnavailableError), flavours["grpc"].client():
            pass
        with ThreadPoolExecutor(len(FLAVOURS)) as threads:
            waiting = {each: threads.submit(flavours[each].client, wait_ready_s=LONG_S) for each in flavours}
            self.server = EmbeddedServer.start(
                models,
                ports=ports,
                installation=installation_with(["--model-control-mode=explicit"], folder / "installation"),
                log_file=folder / "server.log",
            )
            until.enter_context(self.server)
            until.callback(self._kill)
            self.clients = {each: future.result() for each, future in waiting.items()}
        for client in self.clients.values():
            until.enter_context(client)

    def _kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)  # with a dead stub, it would take half a minute to stop
        self.server.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as until:
        yield Served(tmp_path_factory.mktemp("served"), until)


@pytest.fixture(params=FLAVOURS)
def client(request: pytest.FixtureRequest, served: Served) -> AnyClient:
    """Each client that was made before the server."""
    return served.clients[request.param]


def test_a_client_that_was_there_before_its_server_has_one(client: AnyClient) -> None:
    assert asked(client, "is_server_live") is True
    assert asked(client, "is_server_ready") is True
    assert asked(client, "is_model_ready", "nobody") is False
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics", "load_model"):
        with pytest.raises(InferenceError):
            asked(client, method, "nobody")


@pytest.mark.needs_triton("2.51", "2.41 leaves out, over HTTP, fields that tritonclient's messages of gRPC have")
def test_all_clients_are_told_the_same(served: Served) -> None:
    for name in ("rows", "countdown"):
        asked(served.clients["grpc"], "load_model", name)
    for method, values in (
        ("get_server_metadata", ()),
        ("get_model_metadata", ("rows",)),
        ("get_model_metadata", ("rows", "1")),
        ("get_model_config", ("rows",)),
        ("get_model_config", ("countdown",)),
        ("get_inference_statistics", ("rows",)),
        ("get_inference_statistics", ()),
    ):
        eventually(partial(are_told_the_same, served, method, *values))  # figures move for a while after an answer


def test_a_model_is_loaded_with_a_configuration_and_unloaded(served: Served, client: AnyClient) -> None:
    config = '{"backend": "python", "max_batch_size": 2, "input": [], "output": []}'
    code = b"class TritonPythonModel:\n    def execute(self, requests): return []\n"
    asked(client, "load_model", "made_here", config=config, files={"file:1/model.py": code})
    assert asked(client, "get_model_config", "made_here")["max_batch_size"] == 2
    asked(client, "unload_model", "made_here")
    eventually(lambda: not asked(client, "is_model_ready", "made_here"))
