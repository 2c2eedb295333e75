"""A proxy in the environment has no say in what the server at hand has registered, or which models it has."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.model.forward.model_specs import ModelSpecs
from tests.unit.answering_server import answering

NOBODY = "http://localhost:9"


def lie(path: str) -> tuple[int, bytes]:
    """Answer for everybody."""
    said: object = {"name": "m", "input": [], "output": []}
    if path.endswith("/v2/systemsharedmemory/status"):
        said = [{"name": "mine", "key": "/another", "offset": 0, "byte_size": 1}]
    return 200, json.dumps(said).encode()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have the environment name a proxy that answers for everybody; return its address."""
    with answering(lie) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield url


def test_the_server_itself_is_asked_what_is_registered(proxy: str) -> None:
    assert fetch_registrations(proxy)  # it does answer
    with pytest.raises(MachineError, match="does not answer"):
        fetch_registrations(NOBODY)


def test_the_server_itself_is_asked_for_its_models(proxy: str) -> None:
    assert ModelSpecs(proxy).spec("m", "") is not None
    assert ModelSpecs(NOBODY).spec("m", "") is None
