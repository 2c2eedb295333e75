"""A server of either protocol that keeps who asks for the model ``held`` waiting, and answers all others at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.unit.answering_server import answering

__all__ = ["HELD", "HoldingServer", "holding_server"]

HELD = "held"
_LONGEST_HOLD_S = 30


class HoldingServer:
    def __init__(self) -> None:
        self.url = ""
        self.holds = threading.Event()
        self._let_go = threading.Event()

    def hold(self) -> None:
        self.holds.set()
        self._let_go.wait(_LONGEST_HOLD_S)

    def let_go(self) -> None:
        self._let_go.set()

    def hold_again(self) -> None:
        self._let_go.clear()


@contextmanager
def holding_server(protocol: str) -> Iterator[HoldingServer]:
    with _grpc_server() if protocol == "grpc" else _http_server() as server:
        yield server


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    def __init__(self, server: HoldingServer) -> None:
        self._server = server

    def ModelConfig(self, request: Any, _: Any) -> Any:
        if request.name == HELD:
            self._server.hold()
        return service_pb2.ModelConfigResponse()

    def ModelStreamInfer(self, requests: Any, _: Any) -> Iterator[Any]:
        for request in requests:
            yield service_pb2.ModelStreamInferResponse()
            if request.model_name == HELD:
                self._server.hold()
            last = service_pb2.ModelStreamInferResponse()
            last.infer_response.outputs.add(name="Y")
            last.infer_response.parameters["triton_final_response"].bool_param = True
            yield last


@contextmanager
def _grpc_server() -> Iterator[HoldingServer]:
    server = HoldingServer()
    with ThreadPoolExecutor(16) as threads:
        inner = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(server), inner)
        server.url = f"grpc://127.0.0.1:{inner.add_insecure_port('127.0.0.1:0')}"
        inner.start()
        try:
            yield server
        finally:
            server.let_go()
            inner.stop(None).wait()


@contextmanager
def _http_server() -> Iterator[HoldingServer]:
    server = HoldingServer()

    def answer(path: str) -> tuple[int, bytes]:
        if path == f"/v2/models/{HELD}/config":
            server.hold()
        return 200, b"{}"

    with answering(answer) as server.url:
        try:
            yield server
        finally:
            server.let_go()
