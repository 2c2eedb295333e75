"""A proxy in the environment has no say in what the server at hand has registered, or which models it has."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.model.forward.model_specs import ModelSpecs

NOBODY = "http://localhost:9"


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers for everybody."""

    def do_GET(self) -> None:
        said: object = {"name": "m", "input": [], "output": []}
        if self.path.endswith("/v2/systemsharedmemory/status"):
            said = [{"name": "mine", "key": "/another", "offset": 0, "byte_size": 1}]
        answer = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have the environment name a proxy that answers for everybody; return its address."""
    with http.server.HTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield url
        server.shutdown()
        thread.join()


def test_the_server_itself_is_asked_what_is_registered(proxy: str) -> None:
    assert fetch_registrations(proxy)  # it does answer
    with pytest.raises(MachineError, match="does not answer"):
        fetch_registrations(NOBODY)


def test_the_server_itself_is_asked_for_its_models(proxy: str) -> None:
    assert ModelSpecs(proxy).spec("m", "") is not None
    assert ModelSpecs(NOBODY).spec("m", "") is None
