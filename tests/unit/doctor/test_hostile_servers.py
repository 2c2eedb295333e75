"""Whoever answers the doctor may be anybody: it tells findings alone, soon; and what it could not find out."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import shm_backend_utils
from shm_backend_utils.cli import doctor
from shm_backend_utils.cli.doctor import as_json, as_text
from shm_backend_utils.memory.managed import RegionKind
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER
from tests.unit.doctor.test_examined import Server, reports
from tests.unit.fake_server import config
from tests.unit.wire.peers import Listener

VALUES: Final[list[Any]] = [None, 5, [1], {"a": 1}, 1.5, "\x1b[31m", "\ud800", 10**400]
ON_GPUS: Final = config("m", instance_group=[{"kind": "KIND_GPU", "count": 1}])
METADATA: Final = b'{"name":"triton","version":"2","extensions":[]}'


Answers = Callable[[str, bytes], list[bytes] | None]


@contextlib.contextmanager
def answering(pages: dict[str, bytes], answers: Answers = lambda *_: None) -> Iterator[str]:
    """Serve pages over HTTP, and ``{}`` for all else; or what ``answers`` returns for a path and a body, and close."""

    def serve(stream: socket.socket) -> None:
        with contextlib.suppress(ValueError), stream.makefile("rb") as reader:
            while line := reader.readline():
                length = 0
                while (header := reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.partition(b":")[2])
                path, body = line.split()[1].decode(), reader.read(length)
                page, pieces = pages.get(path, b"{}"), answers(path, body)
                for piece in pieces or [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page), page]:
                    stream.sendall(piece)
                if pieces:
                    return

    with Listener(serve) as listener:
        yield listener.url.replace("grpc", "http")


def text_of(*configs: dict[str, Any], report: dict[str, Any] | bytes) -> str:
    """Examine a server; return what is printed, which must be fit for a terminal."""
    with Server(*configs, protocol="http") as server:
        server.probed = reports(report)
        checkup = doctor.examine(server)
    text = as_text(checkup)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    json.loads(as_json(checkup, "x"))
    return text


MEMBERS: Final = ("version", "numpy", "namespaces", "gpus", "visible_devices", "knows_server")
OF_CONFIGURATIONS: Final = ("input", "output", "parameters", "instance_group", "platform", "response_cache")
OF_INPUTS: Final = ("name", "dims", "data_type", "optional")


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("field", [*MEMBERS, *OF_CONFIGURATIONS, *OF_INPUTS])
def test_a_report_and_a_configuration_with_anything_in_it(field: str, value: Any) -> None:
    if field in MEMBERS:
        assert "model m" in text_of(ON_GPUS, report={"version": shm_backend_utils.__version__, field: value})
        return
    made = config("m")
    made |= {field: value} if field in OF_CONFIGURATIONS else {"input": [{**made["input"][0], field: value}]}
    text_of(made, report={})


@pytest.mark.parametrize("report", [b"[" * 16000, b"1" * 16000, b"\xff" * 16000], ids=["deep", "long", "no UTF-8"])
def test_a_report_that_no_parser_likes(report: bytes) -> None:
    assert "wrong-report" in text_of(config("m"), report=report)


@pytest.mark.parametrize("name", ["\x1b[2J", "a/b", "%s", "a\nb", "x" * 300])
def test_a_model_with_any_name(name: str) -> None:
    text_of(config(name), report={})


@pytest.mark.parametrize("told", [5, None, [5], [{"name": "\ud800", "state": "READY"}, {"name": {}}, {}], {"a": 1}])
def test_an_index_with_anything_in_it(told: Any) -> None:
    index = json.dumps({"models": told}).encode()
    with answering({"/v2": METADATA, "/v2/repository/index": index}) as url:
        assert "\nmodel " not in as_text(doctor.examine(url))


@pytest.mark.parametrize("size", ["told", "not told"])
def test_an_answer_without_an_end_is_not_read(size: str) -> None:
    head = f"HTTP/1.1 200 OK\r\n{'Content-Length: 1073741824' if size == 'told' else 'X: y'}\r\n\r\n".encode()
    with answering({}, lambda *_: [head, *[b"[" * 2**20] * 1024]) as url:
        findings = {each.trouble.code: each.found for each in doctor.examine(url).findings}
    assert "more than 33619968 bytes" in findings["server-not-reachable"]


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
def test_an_answer_that_is_nested_too_deeply(status: str) -> None:
    body = b"[" * 100_000
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with answering({}, lambda *_: [head, body]) as url:
        assert "not-triton" in {each.trouble.code for each in doctor.examine(url).findings}


def test_a_hundred_thousand_models_are_not_all_named() -> None:
    models = [{"name": f"m{number}", "state": "READY"} for number in range(100_000)]
    with answering({"/v2": METADATA, "/v2/repository/index": json.dumps(models).encode()}) as url:
        text = as_text(doctor.examine(url))
    assert "more" in text
    assert len(text) < 2**20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["register", "infer"])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, at: str) -> None:
    asked, over = threading.Event(), threading.Event()
    keys: list[str] = []

    def wait(path: str, body: bytes) -> None:
        if path.endswith("/register"):
            keys.append(json.loads(body)["key"])
        if path.endswith("/infer"):
            keys.append(json.loads(body)["parameters"][SLOT_PARAMETER])
        if path.endswith(f"/{at}"):
            asked.set()
            over.wait(60)

    with answering(pages([READY]), wait) as url:
        words = [sys.executable, "-m", "shm_backend_utils", "doctor", url]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert asked.wait(60)
            process.send_signal(number)
            _, error = process.communicate(timeout=60)
        over.set()
    assert process.returncode == 128 + number
    assert error == ""
    assert keys
    assert [file.name for file in Path("/dev/shm").iterdir() if file.name in "".join(keys)] == []


READY: Final[dict[str, Any]] = {"name": "m", "version": "1", "state": "READY"}


def pages(index: Any) -> dict[str, bytes]:
    found = config("m", backend="python")
    return {
        "/v2": METADATA,
        "/v2/repository/index": json.dumps(index).encode(),
        "/v2/models/m/config": json.dumps(found).encode(),
    }


def test_a_server_that_does_not_tell_which_models_it_has() -> None:
    refusal = b'HTTP/1.1 403 Forbidden\r\nContent-Length: 23\r\n\r\n{"error":"not for you"}'
    with answering(pages([]), lambda path, _: [refusal] if path == "/v2/repository/index" else None) as url:
        told = doctor.examine(url)
        assert [each.found for each in told.findings if each.trouble.code == "no-index"] == ["not for you"]
        assert told.exit_status == 1
        assert "no-index" not in {each.trouble.code for each in doctor.examine(url, "m").findings}


@pytest.mark.parametrize("index", [[], [{"name": "m"}], [{"name": "m", "state": "UNAVAILABLE", "reason": "unloaded"}]])
def test_a_server_that_has_no_model(index: list[dict[str, Any]]) -> None:
    with answering(pages(index)) as url:
        told = doctor.examine(url)
    assert [each.trouble.code for each in told.findings] == ["no-models"]
    assert told.exit_status == 1


def test_a_version_that_has_not_loaded_beside_one_that_has() -> None:
    reason = "Internal: ValueError: no weights"
    broken = {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": reason}
    old = {"name": "m", "version": "0", "state": "UNAVAILABLE", "reason": "unloaded"}
    with answering(pages([old, READY, broken])) as url:
        for wanted in (None, "m"):
            told = doctor.examine(url, wanted).findings
            found = [each.found for each in told if each.trouble.code == "model-not-loaded"]
            assert found == [f"version 2 is UNAVAILABLE: {reason}"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT], ids=errno.errorcode.get)
def test_a_dev_shm_of_ones_own_that_takes_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    really_make = SlotRegion.__init__

    def make(region: SlotRegion, *given: Any, kind: RegionKind = RegionKind.SYSTEM, **named: Any) -> None:
        if kind is RegionKind.SYSTEM:
            raise OSError(number, "no file is made there", "/dev/shm")
        named["kind"] = kind
        really_make(region, *given, **named)

    monkeypatch.setattr(SlotRegion, "__init__", make)
    with Server(config("m"), protocol="http") as server:
        server.probed = reports({})
        told = doctor.examine(server)
    assert "no-own-region" in {each.trouble.code for each in told.findings}
    assert "other-namespace" not in {each.trouble.code for each in told.findings}
    lines = [line for _, line in told.fine]
    assert any("has read a nonce in sealed memory" in line for line in lines)
    assert not any("of its own" in line for line in lines)


def test_an_older_version_whose_process_is_dead() -> None:
    def answer(path: str, _: bytes) -> list[bytes] | None:
        if not path.endswith("/infer"):
            return None
        said = (
            b'{"error":"Stub process \'m_0_0\' is not healthy."}' if "/versions/1/" in path else b'{"error":"KeyError"}'
        )
        return [b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(said), said]

    with answering(pages([READY, {**READY, "version": "2"}]), answer) as url:
        told = doctor.examine(url).findings
    assert [each.found for each in told if each.trouble.code == "dead-instance"] == [
        "of version 1: 1 of 1 requests, one after another, met a dead process"
    ]
