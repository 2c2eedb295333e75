"""What a server's URL says."""

from __future__ import annotations

import pytest

from shm_backend_utils.client.options import Tls
from shm_backend_utils.client.settings import ClientSettings
from shm_backend_utils.client.transports.messages import split_url
from shm_backend_utils.errors import CallerError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8001", ("grpc", False, "localhost:8001", "localhost")),
        ("grpc://localhost:8001", ("grpc", False, "localhost:8001", "localhost")),
        ("grpcs://host.example:8001", ("grpc", True, "host.example:8001", "host.example")),
        ("http://127.0.0.1:8000", ("http", False, "127.0.0.1:8000", "127.0.0.1")),
        ("https://host.example:443", ("http", True, "host.example:443", "host.example")),
        ("http://localhost:8000/", ("http", False, "localhost:8000", "localhost")),
        ("http://localhost:8000/triton", ("http", False, "localhost:8000/triton", "localhost")),
        ("grpcs://localhost", ("grpc", True, "localhost", "localhost")),
        ("http://host.example", ("http", False, "host.example", "host.example")),
        ("[::1]:8001", ("grpc", False, "[::1]:8001", "::1")),
        ("https://[fe80::1]:8000/x", ("http", True, "[fe80::1]:8000/x", "fe80::1")),
        ("http://[::1]", ("http", False, "[::1]", "::1")),
    ],
)
def test_a_url_is_taken_apart(url: str, expected: tuple[str, bool, str, str]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "://",
        "grpc://",
        "http:///",
        "ftp://localhost:21",
        "grpcss://localhost:1",
        "unix:///tmp/socket",
        "s://x",
        "grpc://\udcff:1",
        "http://localhost:8000/\ud800",
    ],
)
def test_what_is_no_url_of_a_server_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(CallerError, match="is not one of a server; expected HOST:PORT or grpc://HOST:PORT for gRPC"):
        split_url(url)


@pytest.mark.parametrize("url", ["localhost", "grpc://localhost"])
def test_grpc_without_tls_needs_a_port(url: str) -> None:
    with pytest.raises(CallerError) as error:
        split_url(url)
    assert str(error.value) == f"URL {url!r} names no port; Triton's gRPC is on 8001 by default: 'localhost:8001'"


@pytest.mark.parametrize("url", ["localhost:8000/v2", "grpcs://localhost:8001/triton"])
def test_grpc_has_no_path(url: str) -> None:
    with pytest.raises(CallerError) as error:
        split_url(url)
    assert (
        str(error.value)
        == f"URL {url!r} has a path, which gRPC has not; expected HOST:PORT, or http://HOST:PORT for HTTP"
    )


@pytest.mark.parametrize("url", ["localhost:8001", "grpc://localhost:8001", "http://localhost:8000"])
def test_certificates_for_a_url_without_tls_are_refused(url: str) -> None:
    with pytest.raises(CallerError, match="is without TLS; write grpcs:// or https://"):
        ClientSettings(url, 1.0, "auto", Tls())
