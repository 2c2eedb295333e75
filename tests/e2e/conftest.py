"""What every end-to-end test starts from: a real server, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

from .flavours import FLAVOURS, AnyClient, Flavour, url_of
from .loading_server import LoadingServer
from .wiretap import Wiretap, tapped


def pytest_configure(config: pytest.Config) -> None:
    """Have a mark for what is to hold whatever the memory is made of."""
    config.addinivalue_line("markers", "every_region: with sealed memory, and with memory in /dev/shm")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what has the mark, and clients of the fixtures here, with each of them, unless a test names its own."""
    named = any(mark.args[0] == "region" for mark in metafunc.definition.iter_markers("parametrize"))
    if "region" in metafunc.fixturenames and metafunc.definition.get_closest_marker("every_region") and not named:
        metafunc.parametrize("region", ["sealed", "system"])


@pytest.fixture
def url(protocol: str, triton_server: EmbeddedServer) -> str:
    return url_of(triton_server, protocol)


@pytest.fixture
def client(url: str, region: RegionName) -> Iterator[ShmClient]:
    """The blocking client, over each protocol; as most tests are about shared memory, no call is too small for it."""
    with ShmClient(url, timeout_s=30, inline_bytes=0, pool=PoolOptions(region=region)) as client:
        yield client


@pytest.fixture
def grpc_client(triton_server: EmbeddedServer, region: RegionName) -> Iterator[ShmClient]:
    """The blocking client over gRPC, for what is the same over both protocols, or needs streams."""
    pool = PoolOptions(region=region)
    with ShmClient(triton_server.grpc_url, timeout_s=30, inline_bytes=0, pool=pool) as client:
        yield client


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest, triton_server: EmbeddedServer, region: RegionName) -> Flavour:
    """Each of the four clients, to be made by the test with options of its own."""
    protocol, _, kind = request.param.partition(" ")
    return Flavour(url_of(triton_server, protocol), kind == "aio", region)


@pytest.fixture
def any_client(flavour: Flavour) -> Iterator[AnyClient]:
    with flavour.client() as client:
        yield client


@pytest.fixture
def wiretap(flavour: Flavour) -> Iterator[Wiretap]:
    with tapped(flavour.url.removeprefix("http://")) as wiretap:
        yield wiretap


@pytest.fixture
def tapped_client(flavour: Flavour, wiretap: Wiretap) -> Iterator[AnyClient]:
    url = wiretap.address if flavour.has_streams else f"http://{wiretap.address}"
    with replace(flavour, url=url).client() as client:
        yield client


@pytest.fixture(scope="session")
def loading_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadingServer]:
    """A server without models, for tests that load their own."""
    with LoadingServer(tmp_path_factory.mktemp("loading")) as server:
        yield server
