"""A call on a connection that is closed meanwhile is told so, whichever moment the end comes at."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from shm_backend_utils.client.transports.connect import connect, connect_async
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.errors import ClosedError
from tests.unit.holding_server import HELD, HoldingServer, holding_server

PATIENCE_S = 20.0
ROUNDS = 30
CLOSED = pytest.raises(ClosedError, match="this client is closed; make a new one")


@pytest.fixture(params=["grpc", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[HoldingServer]:
    with holding_server(request.param) as server:
        yield server


@pytest.fixture
def grpc_server() -> Iterator[HoldingServer]:
    with holding_server("grpc") as server:
        yield server


@pytest.fixture
def _switching() -> Iterator[None]:
    """Have threads give way to each other at nearly every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ask(transport: Transport, model: str = "any") -> Any:
    return transport.send(transport.codec.ask("model config", model), PATIENCE_S)


def ask_async(transport: AsyncTransport, model: str = "any") -> Coroutine[Any, Any, Any]:
    return transport.send(transport.codec.ask("model config", model), PATIENCE_S)


def stream_request(model: str) -> GrpcMessage:
    return GrpcMessage("ModelStreamInfer", service_pb2.ModelInferRequest(model_name=model))


def stream(transport: Transport, model: str = "any") -> Generator[Any, None, None]:
    return transport.stream(stream_request(model), PATIENCE_S)


def stream_async(transport: AsyncTransport, model: str = "any") -> AsyncGenerator[Any, None]:
    return transport.stream(stream_request(model), PATIENCE_S)


class TestThreads:
    def test_what_is_sent_after_the_end(self, server: HoldingServer) -> None:
        transport = connect(server.url, None)
        ask(transport)
        transport.close()
        with CLOSED:
            ask(transport)

    def test_what_waits_for_its_answer(self, server: HoldingServer) -> None:
        transport = connect(server.url, None)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(ask, transport, HELD)
            assert server.holds.wait(PATIENCE_S)
            transport.close()
            with CLOSED:
                answer.result(PATIENCE_S / 2)

    def test_what_grpc_had_not_quite_begun(self, grpc_server: HoldingServer) -> None:
        """GRPC looks twice whether its channel is open, and has a text for each."""
        transport = cast(Any, connect(grpc_server.url, None))

        def begin(*_: Any, **__: Any) -> None:
            transport.close()
            raise ValueError("Cannot invoke RPC: Channel closed!")

        transport._service = SimpleNamespace(ModelConfig=begin, ModelStreamInfer=begin)
        with CLOSED:
            ask(transport)
        with CLOSED:
            next(stream(transport))

    def test_a_stream_after_the_end(self, grpc_server: HoldingServer) -> None:
        transport = connect(grpc_server.url, None)
        transport.close()
        with CLOSED:
            next(stream(transport))

    def test_a_stream_that_waits_for_its_next_answer(self, grpc_server: HoldingServer) -> None:
        transport = connect(grpc_server.url, None)
        answers = stream(transport, HELD)
        next(answers)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(next, answers)
            assert grpc_server.holds.wait(PATIENCE_S)
            transport.close()
            with CLOSED:
                answer.result(PATIENCE_S / 2)

    @pytest.mark.usefixtures("_switching")
    def test_at_any_moment(self, server: HoldingServer) -> None:
        uses: list[Callable[[Transport], Any]] = [ask, ask]
        if server.url.startswith("grpc"):
            uses.append(lambda transport: list(stream(transport)))

        def use_for_ever(transport: Transport, use: Callable[[Transport], Any]) -> None:
            while True:
                use(transport)

        with ThreadPoolExecutor(len(uses)) as threads:
            for number in range(ROUNDS):
                transport = connect(server.url, None)
                ends = [threads.submit(use_for_ever, transport, use) for use in uses]
                time.sleep(number % 10 * 1e-3)
                transport.close()
                assert [type(end.exception(PATIENCE_S / 2)) for end in ends] == [ClosedError] * len(uses)


class TestTasks:
    def test_what_is_sent_after_the_end(self, server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(server.url, None)
            await ask_async(transport)
            await transport.close()
            with CLOSED:
                await ask_async(transport)

        asyncio.run(main())

    def test_what_waits_for_its_answer(self, server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(server.url, None)
            answer = asyncio.create_task(ask_async(transport, HELD))
            assert await asyncio.to_thread(server.holds.wait, PATIENCE_S)
            await transport.close()
            with CLOSED:
                await asyncio.wait_for(answer, PATIENCE_S / 2)

        asyncio.run(main())

    def test_a_stream_after_the_end(self, grpc_server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(grpc_server.url, None)
            await transport.close()
            with CLOSED:
                await anext(stream_async(transport))

        asyncio.run(main())

    def test_a_stream_that_waits_for_its_next_answer(self, grpc_server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(grpc_server.url, None)
            answers = stream_async(transport, HELD)
            await anext(answers)
            answer = asyncio.ensure_future(anext(answers))
            assert await asyncio.to_thread(grpc_server.holds.wait, PATIENCE_S)
            await transport.close()
            with CLOSED:
                await asyncio.wait_for(answer, PATIENCE_S / 2)

        asyncio.run(main())

    def test_at_any_moment(self, server: HoldingServer) -> None:
        async def stream_to_its_end(transport: AsyncTransport) -> None:
            async for _ in stream_async(transport):
                pass

        uses: list[Callable[[AsyncTransport], Coroutine[Any, Any, Any]]] = [ask_async, ask_async]
        if server.url.startswith("grpc"):
            uses.append(stream_to_its_end)

        async def use_for_ever(
            transport: AsyncTransport, use: Callable[[AsyncTransport], Coroutine[Any, Any, Any]]
        ) -> None:
            while True:
                await use(transport)

        async def main() -> None:
            for number in range(ROUNDS):
                transport = connect_async(server.url, None)
                ends = [asyncio.create_task(use_for_ever(transport, use)) for use in uses]
                await asyncio.sleep(number % 10 * 1e-3)
                await transport.close()
                outcomes = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), PATIENCE_S / 2)
                assert [type(outcome) for outcome in outcomes] == [ClosedError] * len(uses)

        asyncio.run(main())

    def test_one_that_is_cancelled_is_cancelled(self, server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(server.url, None)
            answer = asyncio.create_task(ask_async(transport, HELD))
            assert await asyncio.to_thread(server.holds.wait, PATIENCE_S)
            answer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answer
            await transport.close()

        asyncio.run(main())

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell who cancels")
    def test_one_that_is_cancelled_just_before_the_end_is_cancelled(self, server: HoldingServer) -> None:
        async def main() -> None:
            transport = connect_async(server.url, None)
            answer = asyncio.create_task(ask_async(transport, HELD))
            assert await asyncio.to_thread(server.holds.wait, PATIENCE_S)
            answer.cancel()
            await transport.close()
            with pytest.raises(asyncio.CancelledError):
                await answer

        asyncio.run(main())


def test_what_fails_while_it_is_open_has_not_ended(grpc_server: HoldingServer) -> None:
    transport = cast(Any, connect(grpc_server.url, None))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("metadata was invalid")

    transport._service = SimpleNamespace(ModelConfig=fail)
    with pytest.raises(ValueError, match="metadata was invalid"):
        ask(transport)
    transport.close()
