"""A server that answers whatever it is asked over HTTP as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["answering", "telling_registrations"]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]], port: int = 0) -> Iterator[str]:
    """Serve until the block ends, at a free port if none is given: a path has a status and a body. Yield the URL."""

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

    with _Server(("127.0.0.1", port), Handler) as server:
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
