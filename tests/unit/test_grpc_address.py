"""Where a server is over gRPC: what triton-shm-client's arguments make of it, and the channel that is made of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc

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


def test_without_tls_the_channel_is_insecure() -> None:
    assert address_of().channel(Channels())[:3] == ("insecure", "127.0.0.1:1", None)


def test_credentials_make_the_channel_secure() -> None:
    credentials = grpc.ssl_channel_credentials()
    assert address_of(creds=credentials).channel(Channels())[:3] == ("secure", "127.0.0.1:1", credentials)


def test_ssl_makes_credentials_of_files(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("root_certificates", "private_key", "certificate_chain")}
    for file in files.values():
        file.write_bytes(b"")
    address = address_of(ssl=True, **{name: str(file) for name, file in files.items()})
    assert isinstance(address.credentials, grpc.ChannelCredentials)
    assert str(address) == "grpcs://127.0.0.1:1"


def test_credentials_come_before_ssl() -> None:
    credentials = grpc.ssl_channel_credentials()
    assert address_of(ssl=True, creds=credentials).credentials is credentials


def test_files_without_ssl_are_not_read() -> None:
    assert address_of(root_certificates="/nowhere").credentials is None


def test_messages_may_have_any_size_and_connections_are_kept_as_tritonclient_keeps_them() -> None:
    options = dict(address_of().options)
    usual = tritonclient.grpc.KeepAliveOptions()
    assert options.items() >= dict(CHANNEL_OPTIONS).items()
    assert options["grpc.keepalive_time_ms"] == usual.keepalive_time_ms
    assert options["grpc.keepalive_timeout_ms"] == usual.keepalive_timeout_ms


def test_keepalive_options_become_the_channels() -> None:
    keepalive = tritonclient.grpc.KeepAliveOptions(1000, 2000, True, 3)
    options = dict(address_of(keepalive_options=keepalive).options)
    assert options["grpc.keepalive_time_ms"] == 1000
    assert options["grpc.keepalive_timeout_ms"] == 2000
    assert options["grpc.keepalive_permit_without_calls"] is True
    assert options["grpc.http2.max_pings_without_data"] == 3


def test_who_gives_channel_args_gives_all() -> None:
    given = [("grpc.max_send_message_length", 1000)]
    keepalive = tritonclient.grpc.KeepAliveOptions(1000)
    assert list(address_of(channel_args=given, keepalive_options=keepalive).options) == given
