"""What every end-to-end test starts from: a real server, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer

from .flavours import FLAVOURS, AnyClient, Flavour, url_of
from .loading_server import LoadingServer


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> str:
    """The server's address, once for each protocol."""
    return url_of(triton_server, request.param)


@pytest.fixture
def client(url: str) -> Iterator[ShmClient]:
    """The blocking client, over each protocol; as most tests are about shared memory, no call is too small for it."""
    with ShmClient(url, timeout_s=30, inline_bytes=0) as client:
        yield client


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Flavour:
    """Each of the four clients, to be made by the test with options of its own."""
    protocol, _, kind = request.param.partition(" ")
    return Flavour(url_of(triton_server, protocol), kind == "aio")


@pytest.fixture
def any_client(flavour: Flavour) -> Iterator[AnyClient]:
    """Each of the four clients, in one shape."""
    with flavour.client() as client:
        yield client


@pytest.fixture(scope="session")
def loading_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadingServer]:
    """A server without models, for tests that load their own."""
    with LoadingServer(tmp_path_factory.mktemp("loading")) as server:
        yield server


@pytest.fixture(params=["direct", "triton-shm", "inline"])
def path(request: pytest.FixtureRequest) -> PathName:
    """Each way that tensors can go."""
    path: PathName = request.param
    return path
