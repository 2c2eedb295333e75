"""Streams over gRPC, on sockets and by grpcio: how they end, and which socket is kept for the next one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shm_backend_utils.client.errors import InferenceError, ServerUnavailableError
from shm_backend_utils.client.transports.connect import connect
from shm_backend_utils.client.transports.grpc import streams
from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
from shm_backend_utils.client.transports.transport import Transport
from shm_backend_utils.protocol.address import SLOT_PARAMETER
from tests.unit.gpu.fakes import wait_until

PATIENCE_S = 20.0
SOON_S = 0.2


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    """Answers each request of a stream by as many responses as its id says, and tells of the end as Triton does."""

    def __init__(self) -> None:
        self.streams: list[list[str]] = []  # the ids of the requests of each stream so far
        self.peers: list[str] = []  # whose they were
        self.open = 0  # how many streams there are now
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
    with serving(service) as url:
        transport = connect(url, None)
        yield transport
        transport.close()


@contextlib.contextmanager
def serving(service: Service, *options: tuple[str, int]) -> Iterator[str]:
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads, options=options)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


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
    assert len(cast(Any, transport)._idle) == (metadata is None)


def test_responses_behind_the_last_one_are_nobodys(transport: Transport, service: Service) -> None:
    service.further = 200
    assert len(list(answers(transport, "3"))) == 3
    wait_until(lambda: not cast(Any, transport)._streams.used)


def test_callers_at_once_have_a_connection_each(transport: Transport, service: Service) -> None:
    both = [answers(transport, "128") for _ in range(2)]  # twice as many as are read ahead: both are under way at once
    assert [next(each).id for each in both] == ["128", "128"]
    assert [len(list(each)) for each in both] == [127, 127]
    wait_until(lambda: len(cast(Any, transport)._idle) == 2)
    assert len({*service.peers}) == 2


def test_a_stream_is_read_no_further_than_a_little_ahead_of_its_user(transport: Transport) -> None:
    taken = answers(transport, "9", slot="")
    next(taken)
    time.sleep(SOON_S)
    (reading,) = cast(Any, transport)._streams.used
    assert reading.answers.qsize() == streams.AHEAD + 1
    assert len(list(taken)) == 8


@pytest.mark.parametrize("slot", ["", "slot"])
def test_a_user_that_pauses_keeps_its_stream_of_large_answers(service: Service, slot: str) -> None:
    service.content = bytes(2**20)
    options = ("grpc.keepalive_time_ms", 7_200_000), ("grpc.keepalive_timeout_ms", 1000)  # Triton has these, and 20 s
    with serving(service, *options) as url, contextlib.closing(connect(url, None)) as transport:
        taken = answers(transport, "40", slot=slot)
        next(taken)
        time.sleep(4.0)
        assert len(list(taken)) == 39


def test_a_stream_whose_thread_starts_after_an_interrupt_ends_too(
    transport: Transport, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(answers(transport, "1"))
    starts = list[threading.Timer]()

    def start_late(thread: threading.Thread) -> None:
        monkeypatch.undo()
        starts.append(threading.Timer(SOON_S, thread.start))
        starts[0].start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with pytest.raises(KeyboardInterrupt):
        next(answers(transport, "99"))
    starts[0].join()
    wait_until(lambda: not service.open)
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "shm stream reader"])


@pytest.mark.parametrize("is_error", [False, True])
def test_a_stream_that_was_left_ends_and_an_error_ends_it(
    transport: Transport, service: Service, is_error: bool
) -> None:
    if is_error:
        with pytest.raises(InferenceError, match="no number"):
            list(answers(transport, "x"))
    else:
        left = answers(transport, "5")
        next(left)
        left.close()
    wait_until(lambda: not cast(Any, transport)._streams.used)
    assert len(list(answers(transport, "2"))) == 2
    assert service.streams[1:] == [["2"]]


def test_a_stream_that_ends_before_its_last_response_is_an_error(transport: Transport) -> None:
    with pytest.raises(ServerUnavailableError, match="before its last response"):
        list(answers(transport, ""))


def test_a_connection_that_broke_while_it_was_idle_is_not_used(service: Service) -> None:
    with serving(service) as url:
        transport = connect(url, None)
        list(answers(transport, "1"))
    with pytest.raises(ServerUnavailableError, match="failed to connect"):
        list(answers(transport, "2"))
    assert service.streams == [["1"]]
    transport.close()


def test_a_closed_client_leaves_no_stream(transport: Transport, service: Service) -> None:
    list(answers(transport, "1"))
    transport.close()
    wait_until(lambda: not service.open)
