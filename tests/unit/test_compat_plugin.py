"""A plugin of tritonclient's that is registered at compat's client completes the headers of every call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.triton_shm_client import TritonSHMClient

FLOATS: list[Any] = [("X", (4,), np.float32)]


class Gatekeeper(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server that knows no model, and notes who asks what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def service(self, details: Any) -> Any:
        headers = dict(details.invocation_metadata)
        self.asked.append((details.method.rpartition("/")[2], headers.get("authorization")))
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.NOT_FOUND, "unknown model"),
            service_pb2.ModelConfigRequest.FromString,
        )


@pytest.fixture
def gatekeeper() -> Iterator[tuple[Gatekeeper, TritonSHMClient]]:
    asked = Gatekeeper()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[asked])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TritonSHMClient(f"127.0.0.1:{port}") as client:
        yield asked, client
    server.stop(None).wait()


def test_it_completes_those_that_only_ask(gatekeeper: tuple[Gatekeeper, TritonSHMClient]) -> None:
    asked, client = gatekeeper
    client.register_plugin(BasicAuth("me", "secret"))
    client.register_shm_model("unknown", FLOATS, FLOATS, 1, 1)
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer_shm("unknown", {"X": np.zeros((1, 4))})
    assert {name for name, _ in asked.asked} == {"ModelConfig"}
    assert {word for _, word in asked.asked} == {"Basic bWU6c2VjcmV0"}


def test_without_one_the_headers_are_as_they_were(gatekeeper: tuple[Gatekeeper, TritonSHMClient]) -> None:
    asked, client = gatekeeper
    client.register_shm_model("unknown", FLOATS, FLOATS, 1, 1)
    assert {word for _, word in asked.asked} == {None}


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL])
def test_a_server_that_does_not_tell_of_the_model_refuses_its_registration(
    gatekeeper: tuple[Gatekeeper, TritonSHMClient], monkeypatch: pytest.MonkeyPatch, status: grpc.StatusCode
) -> None:
    asked, client = gatekeeper
    monkeypatch.setattr(
        asked,
        "service",
        lambda details: grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(status, "not for you"), service_pb2.ModelConfigRequest.FromString
        ),
    )
    with pytest.raises(InferenceServerException, match="not for you"):
        client.register_shm_model("unknown", FLOATS, FLOATS, 1, 1)
    assert client.registered_models == {}
