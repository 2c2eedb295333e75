"""A client of triton-shm-client's kind: where its server is, its plugins, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client.transports.grpc.address import CHANNEL_OPTIONS, GrpcAddress
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient


class Channels:
    """Takes the place of ``grpc``, and notes which channel was asked for."""

    def insecure_channel(self, target: str, options: Any) -> tuple[Any, ...]:
        return "insecure", target, None, options

    def secure_channel(self, target: str, credentials: Any, options: Any) -> tuple[Any, ...]:
        return "secure", target, credentials, options


def address_of(url: str = "127.0.0.1:1", **named: Any) -> GrpcAddress:
    """Return the address that a client's models use. Nobody has to be there."""
    with TritonSHMClient(url, **named) as client:
        address: GrpcAddress = client._grpc_address
    return address


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("localhost:8001", "localhost"),
        ("localhost", "localhost"),
        ("triton.example:8001", "triton.example"),
        ("192.0.2.1:8001", "192.0.2.1"),
        ("[::1]:8001", "::1"),
        ("dns:triton.example:8001", "triton.example"),
        ("dns:///triton.example:8001", "triton.example"),
        ("dns://192.0.2.7/triton.example:8001", "triton.example"),
        ("ipv4:192.0.2.1:8001", "192.0.2.1"),
        ("ipv6:[2001:db8::1]:8001", "2001:db8::1"),
        ("unix:/run/triton.socket", "localhost"),
        ("unix:///run/triton.socket", "localhost"),
        ("unix-abstract:triton", "localhost"),
        ("unix-server.example:8001", "unix-server.example"),
    ],
)
def test_the_host_in_what_grpc_takes(target: str, host: str) -> None:
    address = address_of(target)
    assert (address.target, address.host) == (target, host)


def test_credentials_make_the_channel_secure_and_come_before_ssl() -> None:
    assert address_of().channel(Channels())[:3] == ("insecure", "127.0.0.1:1", None)
    credentials = grpc.ssl_channel_credentials()
    assert address_of(creds=credentials).channel(Channels())[:3] == ("secure", "127.0.0.1:1", credentials)
    assert address_of(ssl=True, creds=credentials).credentials is credentials


def test_ssl_makes_credentials_of_files_which_are_not_read_without_it(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("root_certificates", "private_key", "certificate_chain")}
    for file in files.values():
        file.write_bytes(b"")
    address = address_of(ssl=True, **{name: str(file) for name, file in files.items()})
    assert isinstance(address.credentials, grpc.ChannelCredentials)
    assert str(address) == "grpcs://127.0.0.1:1"
    assert address_of(root_certificates="/nowhere").credentials is None


def test_messages_may_have_any_size_and_connections_are_kept_as_tritonclient_keeps_them() -> None:
    names = ["keepalive_time_ms", "keepalive_timeout_ms", "keepalive_permit_without_calls"]
    names.append("http2.max_pings_without_data")
    usual, keepalive = tritonclient.grpc.KeepAliveOptions(), tritonclient.grpc.KeepAliveOptions(1000, 2000, True, 3)
    options = dict(address_of().options)
    assert options.items() >= dict(CHANNEL_OPTIONS).items()
    assert [options[f"grpc.{name}"] for name in names[:2]] == [usual.keepalive_time_ms, usual.keepalive_timeout_ms]
    options = dict(address_of(keepalive_options=keepalive).options)
    assert [options[f"grpc.{name}"] for name in names] == [1000, 2000, True, 3]
    given = [("grpc.max_send_message_length", 1000)]  # which then are all
    assert list(address_of(channel_args=given, keepalive_options=keepalive).options) == given


# Plugins


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


def test_an_abandoned_client_without_models_is_forgotten() -> None:
    client = TritonSHMClient("127.0.0.1:1")
    at_exit = weakref.ref(client._at_exit)
    del client
    gc.collect()
    assert at_exit() is None
