"""What sessions ask a server over HTTP, of the emulated one: what is registered, and how models are configured."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from .loaded_model import LoadedModel
from .model_config import as_json
from .regions import RegisteredRegions
from .requests import ServerError

__all__ = ["HttpEndpoint"]

_ALL: Final = "/v2/systemsharedmemory/status"
_ONE: Final = re.compile(r"/v2/systemsharedmemory/region/([^/]+)/status")
_CONFIG: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/config")


class HttpEndpoint:
    """Listens on the loopback interface, in threads of its own. ``model`` raises ServerError if there is none."""

    def __init__(self, regions: RegisteredRegions, model: Callable[[str, str], LoadedModel]) -> None:
        self._regions = regions
        self._model = model

        class Handler(_Handler):
            answer = staticmethod(self._answer)

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="shm harness http", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _answer(self, path: str) -> str:
        config = _CONFIG.fullmatch(path)
        if config is not None:
            name, version = (urllib.parse.unquote(each or "") for each in config.groups())
            return as_json(self._model(name, version).config)
        one = _ONE.fullmatch(path)
        if one is None and path != _ALL:
            raise ServerError("Not Found", "NOT_FOUND")
        found = self._regions.find("" if one is None else urllib.parse.unquote(one[1]))
        fields = [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found]
        return json.dumps(fields)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in list(self._connections):
            try:
                connection.shutdown(2)
            except OSError:
                self._connections.discard(connection)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[str], str]

    def do_GET(self) -> None:
        try:
            status, content = HTTPStatus.OK, self.answer(self.path)
        except ServerError as error:
            status, content = HTTPStatus.NOT_FOUND, json.dumps({"error": error.message})
        body = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
