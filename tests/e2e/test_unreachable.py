"""Servers that cannot be reached, or not in this way: each is told apart, in the given time."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shm_backend_utils.client import ConnectionLostError, DeadlineExceededError, ServerUnavailableError, Tls
from shm_backend_utils.client.errors import TlsError, UnknownHostError
from shm_backend_utils.server import EmbeddedServer
from tests.crash.servers import installation_with

from .flavours import FLAVOURS, client_of

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has it
X = np.arange(5, dtype=np.float32)


class SecureServer(NamedTuple):
    """A server that speaks TLS on its gRPC port."""

    grpc_url: str
    certificate: Path
    another_certificate: Path


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scheme(flavour: str) -> str:
    return flavour.partition(" ")[0]


@pytest.fixture(scope="module")
def secure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("secure")
    shutil.copytree(ROOT / "model_repository" / "identity", folder / "models" / "identity")
    key, certificate = make_certificate(folder, "server")
    _, another = make_certificate(folder, "another")
    options = ["--grpc-use-ssl=1", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    installation = installation_with(options, folder / "installation")
    log_file = folder / "server.log"
    with EmbeddedServer.start(folder / "models", installation=installation, log_file=log_file) as server:
        yield SecureServer(server.grpc_url, certificate, another)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a key, and a certificate of this machine that it signs itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def error_of(flavour: str, url: str, *, timeout_s: float = 10, tls: Tls | None = None) -> Exception:
    with pytest.raises(Exception) as failure, client_of(flavour, url, timeout_s=timeout_s, tls=tls):  # noqa: PT011
        pass
    return failure.value


def test_a_host_name_that_means_nothing(flavour: str, scheme: str) -> None:
    host = "ssl-certificate.invalid"  # which is no trouble with TLS
    error = error_of(flavour, f"{scheme}://{host}:8001")
    assert type(error) is UnknownHostError
    assert f"this machine cannot resolve the host name in {scheme}://{host}:8001;" in str(error)


def test_a_machine_that_is_not_there_does_not_hold_the_caller_up(flavour: str, scheme: str) -> None:
    error = error_of(flavour, f"{scheme}://{ELSEWHERE}:8001", timeout_s=0.2)
    assert type(error) in (ServerUnavailableError, DeadlineExceededError)


def test_somebody_who_listens_and_says_nothing(flavour: str, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        error = error_of(flavour, f"{scheme}://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.2)
    assert type(error) is DeadlineExceededError


@pytest.mark.parametrize("flavour", ["grpc", "grpc aio"])
def test_a_trusted_certificate(secure_server: SecureServer, flavour: str) -> None:
    tls = Tls(root_certificates=str(secure_server.certificate))
    url = f"grpcs://{secure_server.grpc_url}"
    with client_of(flavour, url, tls=tls) as client, client.infer("identity", {"INPUT0": X}) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], X)
        assert result.path == "direct"
    error = error_of(flavour, f"grpc://{secure_server.grpc_url}")
    assert isinstance(error, ServerUnavailableError)
    assert not isinstance(error, ConnectionLostError), "nothing was sent that a model could have run"
    assert "grpcs://" in str(error)


def test_a_certificate_nobody_trusts(secure_server: SecureServer, flavour: str, scheme: str) -> None:
    for tls in (None, Tls(str(secure_server.another_certificate))):
        error = error_of(flavour, f"{scheme}s://{secure_server.grpc_url}", tls=tls)
        assert type(error) is TlsError
        assert "tls=Tls(root_certificates=...)" in str(error)


def test_tls_to_a_server_without(triton_server: EmbeddedServer, flavour: str, scheme: str) -> None:
    address = triton_server.grpc_url if scheme == "grpc" else triton_server.http_url
    error = error_of(flavour, f"{scheme}s://{address}")
    assert type(error) is TlsError
    assert "use grpcs:// or https:// only where the server speaks TLS" in str(error)
