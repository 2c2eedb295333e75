"""A server of either protocol that keeps who asks for the model ``held`` waiting, and answers all others at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

__all__ = ["HELD", "HoldingServer", "holding_server"]

HELD = "held"
_LONGEST_HOLD_S = 30


class HoldingServer:
    """What it and its test know of each other.

    Attributes
    ----------
    url : str
    holds : threading.Event
        Set when somebody waits.
    """

    def __init__(self) -> None:
        self.url = ""
        self.holds = threading.Event()
        self._let_go = threading.Event()

    def hold(self) -> None:
        """Have who asks wait for the end of the test."""
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
        """Answer once, and once more in the end."""
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


class _HttpServer(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def _http_server() -> Iterator[HoldingServer]:
    server = HoldingServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == f"/v2/models/{HELD}/config":
                server.hold()
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with _HttpServer(("127.0.0.1", 0), Handler) as inner:
        server.url = f"http://127.0.0.1:{inner.server_port}"
        thread = threading.Thread(target=inner.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.let_go()
            inner.shutdown()
            thread.join()
