"""Where a stub finds the server that has started it, by its command line; no proxy has a say in what that one tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.model.config import url_of_parent
from shm_backend_utils.model.forward.forwarder import ModelSpecs
from tests.unit.answering_server import answering

CHILD = "from shm_backend_utils.model.config import url_of_parent; print(url_of_parent())"
PARENT = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {CHILD!r}], check=True)"
SERVER = "/opt/tritonserver/bin/tritonserver"
USUAL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ((), USUAL),
        (("--http-port=9000",), "http://127.0.0.1:9000"),
        (("--http-port", "9000"), "http://127.0.0.1:9000"),
        (("--grpc-port=9001", "--http-port=9000", "--metrics-port=9002"), "http://127.0.0.1:9000"),
        (("--http-port=8999", "--http-port=9000"), "http://127.0.0.1:9000"),
        (("--http-port=9000", "--http-address=127.0.0.2"), "http://127.0.0.2:9000"),
        (("--http-address", "127.0.0.2"), "http://127.0.0.2:8000"),
        (("--http-address=fe80::1",), "http://[fe80::1]:8000"),
        # One that listens everywhere is reached where nobody else can listen: ``localhost`` may be ``::1``, where it
        # does not listen, and anybody may.
        (("--http-address=0.0.0.0",), USUAL),
        (("--http-address=::",), "http://[::1]:8000"),
        (("--http-address=localhost",), None),
        *((words, None) for words in (("--allow-http=false",), ("--allow-http", "false"), ("--allow-http=False",))),
        (("--allow-http=0",), None),
        (("--allow-http=true",), USUAL),
        # Triton parses with getopt_long, and so takes what is short for an option.
        *(((word,), None) for word in ("--http-por=9000", "--allow-htt=false", "--http-addr=127.0.0.2")),
        (("--http-header-forward-pattern=.*", "-h", "--"), USUAL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_server_is_where_its_command_line_says(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], url: str | None
) -> None:
    assert found_below(monkeypatch, SERVER, *words) == url


def test_a_process_that_has_a_server_inside_may_serve_no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_below(monkeypatch, "python3", "--http-port=9000") is None


def test_a_build_for_vertex_ai_serves_http_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    assert found_below(monkeypatch, SERVER) is None
    assert found_below(monkeypatch, SERVER, "--allow-http=true") == USUAL


def found_below(monkeypatch: pytest.MonkeyPatch, program: str, *words: str) -> str | None:
    """Return the URL that this process finds when its parent has such a command line, as a stub's parent has."""
    command = [program, "-c", "echo; read _", *words]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        return url_of_parent()


def test_a_command_line_of_any_bytes_can_be_read_by_a_child_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    monkeypatch.setenv("LC_ALL", "POSIX")
    command = [SERVER, "-c", PARENT, "--id=mod\u00e8le"]
    done = subprocess.run(command, executable=sys.executable, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == USUAL


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


def test_the_server_itself_is_asked_what_is_registered_and_for_its_models(proxy: str) -> None:
    assert fetch_registrations(proxy)  # it does answer
    with pytest.raises(MachineError, match="does not answer"):
        fetch_registrations(NOBODY)
    assert ModelSpecs(proxy).model("m", "") is not None
    assert ModelSpecs(NOBODY).model("m", "") is None
