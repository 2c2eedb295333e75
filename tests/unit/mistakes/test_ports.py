"""A port that is not the one that was meant: another of Triton's, or nobody's. Real servers are in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, InferenceError, ServerUnavailableError, ShmClient
from tests.unit.answering_server import answering

X = {"X": np.ones(3, np.float32)}
Infer = Callable[[str], None]


METRICS = {"mute": (400, b""), "talkative": (200, b"# HELP nv_inference_request_success Number of")}
NO_SUCH_PATH = 404, b'{"error":"Not Found"}'  # as Triton answers


def infer(url: str) -> None:
    with ShmClient(url, timeout_s=10) as client:
        client.infer("m", X)


def infer_in_a_task(url: str) -> None:
    async def run() -> None:
        async with AsyncShmClient(url, timeout_s=10) as client:
            await client.infer("m", X)

    asyncio.run(run())


either = pytest.mark.parametrize("use", [infer, infer_in_a_task])


@pytest.fixture(params=METRICS)
def metrics_port(request: pytest.FixtureRequest) -> Iterator[str]:
    with answering(lambda _: METRICS[request.param]) as url:
        yield url


@pytest.fixture
def grpc_port() -> Iterator[int]:
    with ThreadPoolExecutor(1) as executor:
        server = grpc.server(executor)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield port
        server.stop(None).wait()


@either
def test_http_to_the_metrics(metrics_port: str, use: Infer) -> None:
    with pytest.raises(InferenceError) as error:
        use(metrics_port)
    assert str(error.value).endswith(
        "; is this Triton's HTTP port? By default HTTP is on 8000, and metrics are on 8002"
    )


@either
def test_http_with_a_path_that_the_server_has_not(use: Infer) -> None:
    with answering(lambda _: NO_SUCH_PATH) as url:
        with pytest.raises(InferenceError) as error:
            use(f"{url}/v2")
        assert str(error.value) == (
            f"[404] the server has nothing there: is the path in {url}/v2 right? Triton by itself has none"
        )
        with pytest.raises(InferenceError, match=r"^\[404\] Not Found$"):
            use(url)


@either
def test_grpc_to_http(metrics_port: str, use: Infer) -> None:
    url = metrics_port.removeprefix("http://")
    with pytest.raises(ServerUnavailableError) as error:
        use(url)
    assert str(error.value).startswith(
        f"[StatusCode.UNAVAILABLE] what listens at grpc://{url} speaks HTTP, and not gRPC; is this its port? "
        "Triton's gRPC is on 8001 by default, and its HTTP on 8000, as http://HOST:PORT ("
    )


@either
def test_http_to_grpc(grpc_port: int, use: Infer) -> None:
    url = f"http://127.0.0.1:{grpc_port}"
    with pytest.raises(ServerUnavailableError) as error:
        use(url)
    assert str(error.value) == (
        f"[StatusCode.UNAVAILABLE] what listens at {url} does not speak HTTP, or not without TLS (https://); is this "
        "its port? Triton's HTTP is on 8000 by default, and its gRPC on 8001, as grpc://HOST:PORT"
    )
