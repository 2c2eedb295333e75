"""Registered shared memory, and the emulated server's HTTP endpoint for it and for models' configurations."""

from __future__ import annotations

import contextlib
import http.server
import json
import mmap
import os
import re
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from ...memory.shared_file import DEV_SHM
from .loaded_model import LoadedModel
from .model_folder import as_json
from .requests import ServerError

__all__ = ["HttpEndpoint", "RegisteredRegion", "RegisteredRegions"]

_ALL: Final = "/v2/systemsharedmemory/status"
_ONE: Final = re.compile(r"/v2/systemsharedmemory/region/([^/]+)/status")
_CONFIG: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/config")


class RegisteredRegion(NamedTuple):
    """A region, and the memory that its name stands for."""

    name: str
    key: str
    offset: int
    byte_size: int
    memory: mmap.mmap


class RegisteredRegions:
    """The regions of one emulated server; an unregistered one stays while a request uses it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, RegisteredRegion] = {}
        self._leaving: set[str] = set()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region and map it; ServerError if the name is taken, or the memory does not exist."""
        with self._lock:
            self._let_go()
            if name in self._regions:
                raise ServerError(f"shared memory region '{name}' already in manager", "ALREADY_EXISTS")
            try:
                descriptor = os.open(DEV_SHM / key.lstrip("/"), os.O_RDWR | os.O_CLOEXEC)
            except (OSError, ValueError):
                raise ServerError(f"Unable to open shared memory region: '{key}'", "INTERNAL") from None
            try:
                size = os.fstat(descriptor).st_size
                if not name or byte_size <= 0 or offset < 0 or offset + byte_size > size:
                    raise ServerError(f"failed to register shared memory region '{name}': invalid args")
                memory = mmap.mmap(descriptor, offset + byte_size)
            finally:
                os.close(descriptor)
            self._regions[name] = RegisteredRegion(name, key, offset, byte_size, memory)

    def unregister(self, name: str) -> None:
        """Unmap a region, or all if the name is empty, once no request uses it; an unknown name is ignored."""
        with self._lock:
            self._leaving |= {name} if name else set(self._regions)
            self._let_go()

    def find(self, name: str) -> list[RegisteredRegion]:
        """Return a region, or all of them if the name is empty; ServerError for an unknown name."""
        with self._lock:
            self._let_go()
            if not name:
                return list(self._regions.values())
            if name not in self._regions:
                raise ServerError(f"Unable to find system shared memory region: '{name}'", "NOT_FOUND")
            return [self._regions[name]]

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Return the bytes that a tensor has in a region, which stays mapped until they are released."""
        with self._lock:
            self._let_go()
            region = self._regions.get(name)
            if region is None:
                raise ServerError(f"Unable to find shared memory region: '{name}'", "NOT_FOUND")
            if not 0 <= offset < region.byte_size:
                raise ServerError(f"Invalid offset for shared memory region: '{name}'")
            if byte_size < 0 or offset + byte_size > region.byte_size:
                raise ServerError(f"Invalid offset + byte size for shared memory region: '{name}'")
            start = region.offset + offset
            return memoryview(region.memory)[start : start + byte_size]

    def _let_go(self) -> None:
        """Unmap the unregistered regions that no request uses."""
        for name in self._leaving & set(self._regions):
            with contextlib.suppress(BufferError):
                self._regions[name].memory.close()
                del self._regions[name]
        self._leaving &= set(self._regions)


class HttpEndpoint:
    """Listens on the loopback interface, in threads of its own. ``model`` raises ServerError for an unknown model."""

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
        """Print nothing: a client may go away."""


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
