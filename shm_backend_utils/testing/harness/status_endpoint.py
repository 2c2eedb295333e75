"""Where the emulated server says over HTTP what is registered: a session asks there, as it asks a real one."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
from http import HTTPStatus
from typing import Any, Final

from .regions import RegisteredRegions
from .requests import ServerError

__all__ = ["StatusServer"]

_ALL: Final = "/v2/systemsharedmemory/status"
_ONE: Final = re.compile(r"/v2/systemsharedmemory/region/([^/]+)/status")


class StatusServer:
    """Listens on the loopback interface from its first use on, in threads of its own.

    Parameters
    ----------
    regions : RegisteredRegions
        What it tells of.
    """

    def __init__(self, regions: RegisteredRegions) -> None:
        class Handler(_Handler):
            told = regions

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="shm harness status", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

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
    told: RegisteredRegions

    def do_GET(self) -> None:  # the name that http.server looks for
        one = _ONE.fullmatch(self.path)
        try:
            if one is None and self.path != _ALL:
                raise ServerError("Not Found", "NOT_FOUND")
            found = self.told.find("" if one is None else urllib.parse.unquote(one[1]))
        except ServerError as error:
            self._reply(HTTPStatus.NOT_FOUND, {"error": error.message})
            return
        fields = [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found]
        self._reply(HTTPStatus.OK, fields)

    def _reply(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
