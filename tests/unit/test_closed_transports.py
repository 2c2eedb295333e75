"""A call on a connection that is closed meanwhile is told so, whichever moment the end comes at."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from shm_backend_utils.client.options import Tls
from shm_backend_utils.client.transports.connect import connect, connect_async
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.errors import ClosedError
from tests.unit.holding_server import HELD, HoldingServer, holding_server

PATIENCE_S = 20.0
ROUNDS = 30
CLOSED = pytest.raises(ClosedError, match="this client is closed; make a new one")


class OnLoop(Transport):
    """A transport for tasks, used by threads: each call is a task of one event loop's."""

    def __init__(self, url: str, tls: Tls | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._inner = self._run(self._connect(url, tls))
        self.codec, self.host, self.address = self._inner.codec, self._inner.host, self._inner.address

    async def _connect(self, url: str, tls: Tls | None) -> AsyncTransport:
        return connect_async(url, tls)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def send(self, message: Any, timeout_s: float) -> Any:
        return self._run(self._inner.send(message, timeout_s))

    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        answers = self._inner.stream(message, timeout_s)

        async def following() -> Any:
            return await anext(answers, None)

        while (answer := self._run(following())) is not None:
            yield answer

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._inner.close())

    def end(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server(protocol: str) -> Iterator[HoldingServer]:
    with holding_server(protocol) as server:
        yield server


@pytest.fixture(params=["threads", "tasks"])
def connected(request: pytest.FixtureRequest, server: HoldingServer) -> Iterator[Callable[[], Transport]]:
    with contextlib.ExitStack() as stack:

        def connected() -> Transport:
            if request.param == "threads":
                return connect(server.url, None)
            transport = OnLoop(server.url)
            stack.callback(transport.end)
            return transport

        yield connected


over_grpc = pytest.mark.parametrize("protocol", ["grpc"])


def ask(transport: Transport, model: str = "any") -> Any:
    return transport.send(transport.codec.ask("model config", model), PATIENCE_S)


def stream(transport: Transport, model: str = "any") -> Generator[Any, None, None]:
    return transport.stream(stream_request(model), PATIENCE_S)


def stream_request(model: str) -> GrpcMessage:
    return GrpcMessage("ModelStreamInfer", service_pb2.ModelInferRequest(model_name=model))


def test_what_is_sent_after_the_end(server: HoldingServer, connected: Callable[[], Transport]) -> None:
    transport = connected()
    ask(transport)
    transport.close()
    with CLOSED:
        ask(transport)
    if server.url.startswith("grpc"):
        with CLOSED:
            next(stream(transport))


def test_what_waits_for_its_answer(server: HoldingServer, connected: Callable[[], Transport]) -> None:
    transport = connected()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, transport, HELD)
        assert server.holds.wait(PATIENCE_S)
        transport.close()
        with CLOSED:
            answer.result(PATIENCE_S / 2)


@over_grpc
def test_a_stream_that_waits_for_its_next_answer(server: HoldingServer, connected: Callable[[], Transport]) -> None:
    transport = connected()
    answers = stream(transport, HELD)
    next(answers)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(next, answers)
        assert server.holds.wait(PATIENCE_S)
        transport.close()
        with CLOSED:
            answer.result(PATIENCE_S / 2)


@pytest.mark.usefixtures("switching_often")
def test_at_any_moment(server: HoldingServer, connected: Callable[[], Transport]) -> None:
    uses: list[Callable[[Transport], Any]] = [ask, ask]
    if server.url.startswith("grpc"):
        uses.append(lambda transport: list(stream(transport)))

    def use_for_ever(transport: Transport, use: Callable[[Transport], Any]) -> None:
        while True:
            use(transport)

    with ThreadPoolExecutor(len(uses)) as threads:
        for number in range(ROUNDS):
            transport = connected()
            ends = [threads.submit(use_for_ever, transport, use) for use in uses]
            time.sleep(number % 10 * 1e-3)
            transport.close()
            assert [type(end.exception(PATIENCE_S / 2)) for end in ends] == [ClosedError] * len(uses)


@over_grpc
def test_what_grpc_had_not_quite_begun(server: HoldingServer) -> None:
    """GRPC looks twice whether its channel is open, and has a text for each."""
    transport = cast(Any, connect(server.url, None))

    def begin(*_: Any, **__: Any) -> None:
        transport.close()
        raise ValueError("Cannot invoke RPC: Channel closed!")

    transport._connections, transport._service = None, lambda: SimpleNamespace(ModelStreamInfer=begin)
    with CLOSED:
        next(stream(transport))


@pytest.mark.parametrize("is_closed_first", [False, True])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell who cancels")
def test_a_task_that_is_cancelled_is_cancelled_even_just_before_the_end(
    server: HoldingServer, is_closed_first: bool
) -> None:
    async def main() -> None:
        transport = connect_async(server.url, None)
        answer = asyncio.create_task(transport.send(transport.codec.ask("model config", HELD), PATIENCE_S))
        assert await asyncio.to_thread(server.holds.wait, PATIENCE_S)
        answer.cancel()
        if is_closed_first:
            await transport.close()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await transport.close()

    asyncio.run(main())


@over_grpc
def test_what_fails_while_it_is_open_has_not_ended(server: HoldingServer) -> None:
    transport = cast(Any, connect(server.url, None))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("metadata was invalid")

    transport._connections, transport._service = None, lambda: SimpleNamespace(ModelStreamInfer=fail)
    with pytest.raises(ValueError, match="metadata was invalid"):
        next(stream(transport))
    transport.close()
