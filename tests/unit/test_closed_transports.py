"""Connections over gRPC and HTTP that are closed under a call, which is told so; and how streams end over gRPC."""

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
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shm_backend_utils.client.errors import InferenceError, ServerUnavailableError
from shm_backend_utils.client.options import Tls
from shm_backend_utils.client.transports.grpc import streams
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport, connect, connect_async
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER
from tests.unit.answering_server import HELD, HoldingServer, holding_server, serving_grpc
from tests.unit.gpu.fakes import wait_until

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


by_both = pytest.mark.parametrize("slot", ["", "slot"], ids=["grpcio", "sockets"])
"""With a slot's parameter, a stream of threads goes over the client's own sockets."""
over_grpc = pytest.mark.parametrize("protocol", ["grpc"])


def ask(transport: Transport, model: str = "any") -> Any:
    return transport.send(transport.codec.ask("model config", model), PATIENCE_S)


def stream(transport: Transport, model: str = "any", slot: str = "") -> Generator[Any, None, None]:
    request = service_pb2.ModelInferRequest(model_name=model)
    if slot:
        request.parameters[SLOT_PARAMETER].string_param = slot
    return transport.stream(GrpcMessage("ModelStreamInfer", request), PATIENCE_S)


def test_calls_under_way_at_close_or_sent_after_it_raise_closed_error(
    server: HoldingServer, connected: Callable[[], Transport]
) -> None:
    transport = connected()
    ask(transport)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, transport, HELD)
        assert server.holds.wait(PATIENCE_S)
        transport.close()
        with CLOSED:
            answer.result(PATIENCE_S / 2)
    with CLOSED:
        ask(transport)


@over_grpc
@by_both
def test_close_ends_a_stream_that_waits(server: HoldingServer, connected: Callable[[], Transport], slot: str) -> None:
    transport = connected()
    answers = stream(transport, HELD, slot)
    next(answers)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(next, answers)
        assert server.holds.wait(PATIENCE_S)
        transport.close()
        with CLOSED:
            answer.result(PATIENCE_S / 2)
    with CLOSED:
        next(stream(transport, slot=slot))
    assert isinstance(transport, OnLoop) or not cast(Any, transport)._stream_connections.in_use


@pytest.mark.usefixtures("switching_often")
def test_close_at_any_moment_raises_closed_error(server: HoldingServer, connected: Callable[[], Transport]) -> None:
    uses: list[Callable[[Transport], Any]] = [ask, ask]
    if server.url.startswith("grpc"):
        uses += [lambda transport: list(stream(transport)), lambda transport: list(stream(transport, slot="slot"))]

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
@pytest.mark.parametrize("is_closed", [True, False])
def test_grpcs_error_for_a_closed_channel_is_a_closed_error(server: HoldingServer, is_closed: bool) -> None:
    """GRPC looks twice whether its channel is open, and has a text for each."""
    transport = cast(Any, connect(server.url, None))

    def begin(*_: Any, **__: Any) -> None:
        if is_closed:
            transport.close()
        raise ValueError("Cannot invoke RPC: Channel closed!" if is_closed else "metadata was invalid")

    transport._service = lambda: SimpleNamespace(ModelStreamInfer=begin)
    with CLOSED if is_closed else pytest.raises(ValueError, match="metadata was invalid"):
        next(stream(transport))
    transport.close()


@pytest.mark.parametrize("is_closed_first", [False, True])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell who cancels")
def test_a_cancelled_task_is_cancelled_before_the_end(server: HoldingServer, is_closed_first: bool) -> None:
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


SOON_S = 0.2


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    """Answers each request of a stream by as many responses as its id says, and tells of the end as Triton does."""

    def __init__(self) -> None:
        self.streams: list[list[str]] = []  # the ids of the requests of each stream so far
        self.peers: list[str] = []  # whose they were
        self.open = 0  # how many streams there are now
        self.cancelled = 0
        self.content = b""  # of each response
        self.further = 0  # so many responses come behind the last one

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        seen = list[str]()
        self.streams.append(seen)
        self.peers.append(context.peer())
        self.open += 1
        for request in requests:
            seen.append(request.id)
            if not request.id:
                break
            if request.id == "holds":
                is_over = threading.Event()
                context.add_callback(is_over.set)
                yield service_pb2.ModelStreamInferResponse()
                if is_over.wait(PATIENCE_S):
                    self.cancelled += 1
                break
            if not request.id.isdigit():
                yield service_pb2.ModelStreamInferResponse(error_message="no number")
                continue
            assert request.parameters["triton_enable_empty_final_response"].bool_param
            for number in range(int(request.id) + 1):
                answer = service_pb2.ModelStreamInferResponse()
                answer.infer_response.id = request.id
                answer.infer_response.raw_output_contents.append(self.content)
                answer.infer_response.parameters["triton_final_response"].bool_param = number == int(request.id)
                yield answer
            for _ in range(self.further):
                yield answer
        self.open -= 1


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def transport(service: Service) -> Iterator[Transport]:
    with serving_grpc(service) as url, contextlib.closing(connect(url, None)) as transport:
        yield transport


def answers(transport: Transport, name: str, metadata: Any = None, slot: str = "slot") -> Any:
    request = service_pb2.ModelInferRequest(id=name)
    if slot:
        request.parameters[SLOT_PARAMETER].string_param = slot
    return transport.stream(GrpcMessage("ModelStreamInfer", request, metadata), PATIENCE_S)


@pytest.mark.parametrize("metadata", [None, [("name", "value")]], ids=["sockets", "grpcio"])
def test_one_caller_has_one_connection(transport: Transport, service: Service, metadata: Any) -> None:
    for count in (3, 0, 7, 1):
        assert len(list(answers(transport, str(count), metadata))) == count
        wait_until(lambda: not cast(Any, transport)._streams.used)
    assert service.streams == [["3"], ["0"], ["7"], ["1"]]
    assert len({*service.peers}) == 1
    assert len(cast(Any, transport)._stream_connections._idle) == (metadata is None)
    service.further = 10**9  # responses behind the last one, which are nobody's
    assert len(list(answers(transport, "3", metadata))) == 3
    wait_until(lambda: not cast(Any, transport)._streams.used)


def test_callers_at_once_have_a_connection_each(transport: Transport, service: Service) -> None:
    both = [answers(transport, "9") for _ in range(2)]
    assert [next(each).id for each in both] == ["9", "9"]
    assert [len(list(each)) for each in both] == [8, 8]
    wait_until(lambda: len(cast(Any, transport)._stream_connections._idle) == 2)
    assert len({*service.peers}) == 2


def test_a_stream_is_read_no_further_than_a_little_ahead_of_its_user(transport: Transport) -> None:
    taken = answers(transport, "9", slot="")
    next(taken)
    time.sleep(SOON_S)
    (reading,) = cast(Any, transport)._streams.used
    assert reading.answers.qsize() == streams.AHEAD + 1
    assert len(list(taken)) == 8


@by_both
def test_a_user_that_pauses_keeps_its_stream_of_large_answers(service: Service, slot: str) -> None:
    service.content = bytes(2**20)
    options = ("grpc.keepalive_time_ms", 7_200_000), ("grpc.keepalive_timeout_ms", 1000)  # Triton has these, and 20 s
    with serving_grpc(service, *options) as url, contextlib.closing(connect(url, None)) as transport:
        taken = answers(transport, "40", slot=slot)
        next(taken)
        time.sleep(4.0)
        assert len(list(taken)) == 39


def test_a_late_reading_thread_ends(transport: Transport, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = list[threading.Timer](), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name != "shm stream reader":
            start(thread)
            return
        monkeypatch.undo()
        starts.append(threading.Timer(SOON_S, thread.start))
        starts[0].start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with pytest.raises(KeyboardInterrupt):
        next(answers(transport, "99", slot=""))
    starts[0].join()
    wait_until(lambda: not service.open)
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "shm stream reader"])


@pytest.mark.parametrize("is_error", [False, True])
def test_a_stream_ends_when_left_and_by_an_error(transport: Transport, service: Service, is_error: bool) -> None:
    if is_error:
        with pytest.raises(InferenceError, match="no number"):
            list(answers(transport, "x"))
    else:
        left = answers(transport, "5")
        next(left)
        left.close()
    wait_until(lambda: not cast(Any, transport)._stream_connections.in_use)
    assert len(list(answers(transport, "2"))) == 2
    assert service.streams[1:] == [["2"]]
    assert len({*service.peers}) == 2  # an interrupt may have taken bytes of one that was left
    with pytest.raises(ServerUnavailableError, match="before its last response"):
        list(answers(transport, ""))


@by_both
@pytest.mark.parametrize("has_threads", [True, False])
def test_left_streams_that_go_on_are_cancelled(
    transport: Transport, service: Service, slot: str, has_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [answers(transport, "holds", slot=slot) for _ in range(2)]
    for each in both:
        next(each)
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread_starts)
    for each in both:
        each.close()
    time.sleep(SOON_S)
    assert not service.cancelled
    wait_until(lambda: service.cancelled == 2)
    monkeypatch.undo()
    assert len(list(answers(transport, "3", slot=slot))) == 3


def no_thread_starts(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_connection_that_broke_while_idle_is_not_used_and_a_closed_client_leaves_none(service: Service) -> None:
    with serving_grpc(service) as url:
        closed, transport = connect(url, None), connect(url, None)
        list(answers(closed, "1"))
        closed.close()
        wait_until(lambda: not service.open)
        list(answers(transport, "1"))
    with pytest.raises(ServerUnavailableError, match="failed to connect"):
        list(answers(transport, "2"))
    assert service.streams == [["1"]] * 2
    transport.close()
