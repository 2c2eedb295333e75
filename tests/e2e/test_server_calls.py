"""What a client asks of a server beside inference: over both protocols, in one shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from shm_backend_utils.client import InferenceError, ServerUnavailableError
from shm_backend_utils.server import EmbeddedServer, Ports

from .eventually import eventually
from .flavours import FLAVOURS, AnyClient, AwaitedClient, client_of, url_of


def asked(client: AnyClient, method: str, *values: Any, **named: Any) -> Any:
    if isinstance(client, AwaitedClient):
        return client.run(getattr(client.aio, method)(*values, **named))
    return getattr(client, method)(*values, **named)


def are_told_the_same(server: EmbeddedServer, method: str, *values: str) -> bool:
    told = []
    for flavour in FLAVOURS:
        with client_of(flavour, url_of(server, flavour)) as client:
            told.append(asked(client, method, *values))
    return told == [told[0]] * len(told)


@pytest.fixture(params=FLAVOURS)
def client(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[AnyClient]:
    with client_of(request.param, url_of(triton_server, request.param), timeout_s=30) as client:
        yield client


def test_a_server_is_there_and_a_model_that_is_not_there_is_not_ready(client: AnyClient) -> None:
    assert asked(client, "is_server_live") is True
    assert asked(client, "is_server_ready") is True
    assert asked(client, "get_server_metadata")["name"] == "triton"
    assert asked(client, "is_model_ready", "nobody") is False
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics", "load_model"):
        with pytest.raises(InferenceError):
            asked(client, method, "nobody")


def test_where_no_server_is_a_client_says_so() -> None:
    with pytest.raises(ServerUnavailableError), client_of("grpc", f"localhost:{Ports().resolve().grpc}"):
        pass


@pytest.mark.needs_triton("2.51", "2.41 leaves out, over HTTP, fields that tritonclient's messages of gRPC have")
def test_all_clients_are_told_the_same(triton_server: EmbeddedServer) -> None:
    for method, values in (
        ("get_server_metadata", ()),
        ("get_model_metadata", ("rows",)),
        ("get_model_metadata", ("rows", "1")),
        ("get_model_config", ("rows",)),
        ("get_model_config", ("countdown",)),
        ("get_inference_statistics", ("rows",)),
        ("get_inference_statistics", ()),
    ):
        eventually(partial(are_told_the_same, triton_server, method, *values))  # figures move for a while


def test_a_model_is_loaded_with_a_configuration_and_unloaded(client: AnyClient) -> None:
    config = '{"backend": "python", "max_batch_size": 2, "input": [], "output": []}'
    code = b"class TritonPythonModel:\n    def execute(self, requests): return []\n"
    asked(client, "load_model", "made_here", config=config, files={"file:1/model.py": code})
    assert asked(client, "get_model_config", "made_here")["max_batch_size"] == 2
    asked(client, "unload_model", "made_here")
    eventually(lambda: not asked(client, "is_model_ready", "made_here"))
