"""What every end-to-end test starts from: a real server, and a client of it over either protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> str:
    """The server's address, once for each protocol."""
    return {"grpc": triton_server.grpc_url, "http": f"http://{triton_server.http_url}"}[request.param]


@pytest.fixture
def client(url: str) -> Iterator[ShmClient]:
    with ShmClient(url, timeout_s=30) as client:
        yield client
