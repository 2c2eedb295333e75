"""Servers that answer whatever they are asked as a test says; one keeps who asks for the model ``held`` waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

__all__ = ["HELD", "HoldingServer", "answering", "holding_server", "serving_grpc", "telling_registrations"]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """Serve until the block ends: a path has a status and a body. Yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def telling_registrations(registered: list[Any]) -> Iterator[str]:
    """Serve the one endpoint that tells what is registered, which a test may change meanwhile; yields the URL."""

    def answer(path: str) -> tuple[int, bytes]:
        status = 200 if path == "/v2/systemsharedmemory/status" else 404
        return status, json.dumps(registered).encode()

    with answering(answer) as url:
        yield url


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
    server = HoldingServer()

    def answer(path: str) -> tuple[int, bytes]:
        if path == f"/v2/models/{HELD}/config":
            server.hold()
        return 200, b"{}"

    with serving_grpc(_Service(server)) if protocol == "grpc" else answering(answer) as server.url:
        try:
            yield server
        finally:
            server.let_go()


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
def serving_grpc(service: Any, *options: tuple[str, int]) -> Iterator[str]:
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads, options=options)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
