"""Where a stub finds the server that has started it, and which processes are a model's: by their command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils.client import model_processes
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.model.forward.forwarder import ModelSpecs
from shm_backend_utils.model.server_url import url_of_parent
from tests.unit.answering_server import answering

CHILD = "from shm_backend_utils.model.server_url import url_of_parent; print(url_of_parent())"
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


STUB = "/opt/tritonserver/backends/python/triton_python_backend_stub"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("names\n 0: 00000000:1F41 00000000:0000 0A 0:0 0:0 0 0 0 777 1\n")
    begin(tmp_path, 10, 1, "/opt/tritonserver")
    (tmp_path / "10/fd").mkdir()
    (tmp_path / "10/fd/3").symlink_to("socket:[777]")
    monkeypatch.setattr(model_processes, "_PROC", tmp_path)
    return tmp_path


def begin(proc: Path, pid: int, parent: int, *words: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) S {parent} 0 0")


@pytest.mark.parametrize(
    ("stubs", "living"),
    [
        ([("/models/a/1", "a_0_0"), ("/models/a/1", "a_0_1")], 2),
        ([("/models/a/1", "a_0_0"), ("/models/a_0/1", "a_0_0")], 1),
        ([("/models/a_0/1", "a_0_0")], 0),
        ([("/models/a/1", "a_0_0"), ("/models/b/1", "a_0_1")], 1),
        ([("/tmp/folderXq3F9z/1", "a_0_0"), ("/tmp/folderXq3F9z/1", "a_0_1")], 2),
        ([("/models/a/1", "a_0_0"), ("/models/a/2", "a_0_1")], 1),
    ],
    ids=["its own", "beside another model's", "another model's", "of a given name", "fetched", "of another version"],
)
def test_a_process_counts_for_its_model_alone(proc: Path, stubs: list[tuple[str, str]], living: int) -> None:
    for pid, (folder, instance) in enumerate(stubs, 11):
        begin(proc, pid, 10, STUB, f"{folder}/model.py", "shm1", "1", "1", "10", "/opt", "64", instance, "DEFAULT")
    begin(proc, 99, 1, STUB)  # somebody else's, who says nothing
    described = {"name": "a", "instance_group": [{"name": "a_0", "kind": "KIND_CPU", "count": 2}]}
    assert model_processes.living_processes("grpc://localhost:8001", described, "1") == living
