"""Where a stub finds its server, which processes are a model's, and what the server is asked of other models."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import server_calls
from shm_backend_utils.errors import ForwardError, MachineError, ModelError, TensorError
from shm_backend_utils.memory.registrations import fetch_registrations
from shm_backend_utils.model.config import url_of_server
from shm_backend_utils.model.forward.forwarder import Forwarder, ModelSpecs
from shm_backend_utils.tensors.values import untyped_array
from tests.unit.answering_server import answering

CHILD = "from shm_backend_utils.model.config import url_of_server; print(url_of_server())"
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
)
def test_command_lines_name_a_server(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], url: str | None) -> None:
    assert found_below(monkeypatch, SERVER, *words) == url


def test_a_server_within_another_process_and_for_vertex_ai_may_serve_no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_below(monkeypatch, "python3", "--http-port=9000") is None
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    assert found_below(monkeypatch, SERVER) is None
    assert found_below(monkeypatch, SERVER, "--allow-http=true") == USUAL


def found_below(monkeypatch: pytest.MonkeyPatch, program: str, *words: str) -> str | None:
    command = [program, "-c", "echo; read _", *words]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        monkeypatch.delitem(sys.modules, "triton_python_backend_utils", raising=False)  # an emulated one knows its own
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        return url_of_server()


def test_a_command_line_of_any_bytes_can_be_read_by_a_child_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    monkeypatch.setenv("LC_ALL", "POSIX")
    command = [SERVER, "-c", PARENT, "--id=mod\u00e8le"]
    done = subprocess.run(command, executable=sys.executable, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == USUAL


MASKED = np.ma.MaskedArray([1], True)
NOBODY = "http://localhost:9"


def lie(path: str) -> tuple[int, bytes]:
    said: object = {"name": "m", "input": [], "output": []}
    if path.endswith("/v2/systemsharedmemory/status"):
        said = [{"name": "mine", "key": "/another", "offset": 0, "byte_size": 1}]
    return 200, json.dumps(said).encode()


def test_the_server_itself_is_asked_what_is_registered_and_for_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(lie) as proxy:  # which answers for everybody
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
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
    monkeypatch.setattr(server_calls, "_PROC", tmp_path)
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
)
def test_a_process_counts_for_its_model_alone(proc: Path, stubs: list[tuple[str, str]], living: int) -> None:
    for pid, (folder, instance) in enumerate(stubs, 11):
        begin(proc, pid, 10, STUB, f"{folder}/model.py", "shm1", "1", "1", "10", "/opt", "64", instance, "DEFAULT")
    begin(proc, 99, 1, STUB)  # somebody else's, who says nothing
    described = {"name": "a", "instance_group": [{"name": "a_0", "kind": "KIND_CPU", "count": 2}]}
    assert server_calls.living_processes("grpc://localhost:8001", described, "1") == living


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([b"a\0", "\u00fc"], [b"a\0", "\u00fc"]),
        (np.array(["a"]), ["a"]),
        ([[1, 2]], [[1, 2]]),
        (np.array([1.5], ">f8"), [1.5]),
        (np.ma.MaskedArray([1]), [1]),
        *((value, None) for value in (MASKED, [[1], [2, 3]], [MASKED, [2]])),
    ],
)
def test_a_value_for_a_model_of_which_nobody_tells_is_what_numpy_takes_it_for(value: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(TensorError, match="tensor 'X' (has 1 masked elements|is a nested list that is not rect)"):
            untyped_array("X", value)
    else:
        array = untyped_array("X", value)
        assert (array.tolist(), type(array), array.dtype.isnative) == (expected, np.ndarray, True)


def config(name: str, dims: int = -1) -> dict[str, Any]:
    tensors = {"data_type": "TYPE_FP32", "dims": [dims]}
    return {"name": name, "input": [{"name": "X", **tensors}], "output": [{"name": "Y", **tensors}]}


class Server:
    def __init__(self) -> None:
        self.configs: dict[str, Any] = {}
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes]:
        place = path.removeprefix("/v2/models/").removesuffix("/config")
        self.asked.append(place)
        found = self.configs.get(place)
        return (400, b"{}") if found is None else (200, json.dumps(found).encode())


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with answering(server.answer) as server.url:
        yield server


@pytest.fixture
def specs(server: Server) -> ModelSpecs:
    return ModelSpecs(server.url)


def dims_of(specs: ModelSpecs, model: str, version: str = "") -> tuple[int, ...]:
    known = specs.model(model, version)
    assert known is not None
    return known.spec.outputs["Y"].shape


def test_each_model_and_version_is_asked_for_once_until_it_is_forgotten(server: Server, specs: ModelSpecs) -> None:
    models = (("a", ""), ("b", ""), ("a", "7"))
    server.configs = {"a": config("a", 1), "b": config("b", 2), "a/versions/7": config("a", 7)}
    for _ in range(2):
        assert [dims_of(specs, *each) for each in models] == [(1,), (2,), (7,)]
    assert server.asked == ["a", "b", "a/versions/7"]
    server.configs = {"a": config("a", 3), "b": config("b", 3), "a/versions/7": config("a", 3)}
    specs.forget("a")
    assert [dims_of(specs, *each) for each in models] == [(3,), (2,), (3,)]


def test_models_that_there_are_not_are_not_kept(server: Server, specs: ModelSpecs) -> None:
    for number in range(200):
        with pytest.raises(ModelError, match="no such model"):
            specs.model(f"nobody {number}", "")
    assert specs._known == {}
    server.configs["nobody%200"] = config("nobody 0", 4)  # now there is one of them
    assert dims_of(specs, "nobody 0") == (4,)


def test_a_model_that_failed_is_asked_for_anew(server: Server) -> None:
    given_up: list[bool] = []

    def fail(_: object) -> None:
        raise ForwardError("it failed")

    failing: Any = SimpleNamespace(model="a", result=fail, give_up=lambda: given_up.append(True))
    nothing: Any = None
    with contextlib.closing(Forwarder("m", nothing, nothing, server.url)) as forwarder:
        server.configs["a"] = config("a", 1)
        dims_of(forwarder._specs, "a")
        server.configs["a"] = config("a", 2)
        with pytest.raises(ForwardError):
            forwarder.finish(failing, None)
        assert given_up == [True]
        assert dims_of(forwarder._specs, "a") == (2,)
