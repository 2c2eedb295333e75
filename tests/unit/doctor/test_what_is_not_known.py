"""What the doctor could not find out is no sign of health, nor of anything else."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, Final

import pytest

from shm_backend_utils.cli.doctor import examination
from shm_backend_utils.client.errors import DeadlineExceededError, ServerUnavailableError
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.pool.slot import SlotRegion
from tests.unit.doctor.test_examined import Server, codes, reports
from tests.unit.doctor.test_hostile_servers import METADATA, answering
from tests.unit.doctor.test_hostile_servers import no_machine as no_machine  # noqa: PLC0414  # a fixture
from tests.unit.fake_server import config

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
    with answering(pages([]), answers=lambda path, _: refusal if path == "/v2/repository/index" else None) as url:
        told = examination.examine(url)
        assert [each.found for each in told.findings if each.trouble.code == "no-index"] == ["not for you"]
        assert told.exit_status == 1
        assert "no-index" not in {each.trouble.code for each in examination.examine(url, "m").findings}


@pytest.mark.parametrize("index", [[], [{"name": "m"}], [{"name": "m", "state": "UNAVAILABLE", "reason": "unloaded"}]])
def test_a_server_that_has_no_model(index: list[dict[str, Any]]) -> None:
    with answering(pages(index)) as url:
        told = examination.examine(url)
    assert [each.trouble.code for each in told.findings] == ["no-models"]
    assert told.exit_status == 1


def test_a_version_that_has_not_loaded_beside_one_that_has() -> None:
    reason = "Internal: ValueError: no weights"
    broken = {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": reason}
    old = {"name": "m", "version": "0", "state": "UNAVAILABLE", "reason": "unloaded"}
    with answering(pages([old, READY, broken])) as url:
        for wanted in (None, "m"):
            told = examination.examine(url, wanted).findings
            found = [each.found for each in told if each.trouble.code == "model-not-loaded"]
            assert found == [f"version 2 is UNAVAILABLE: {reason}"]


NO_REGIONS: Final = [errno.EROFS, errno.EACCES, errno.ENOENT]


@pytest.mark.parametrize("number", NO_REGIONS, ids=errno.errorcode.get)
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
        told = examination.examine(server)
    assert "no-own-region" in {each.trouble.code for each in told.findings}
    assert "other-namespace" not in {each.trouble.code for each in told.findings}
    lines = [line for _, line in told.fine]
    assert any("has read a nonce in sealed memory" in line for line in lines)
    assert not any("of its own" in line for line in lines)


def test_neither_kind_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "no file is made there", "/dev/shm")

    monkeypatch.setattr(SlotRegion, "__init__", fail)
    with Server(config("m")) as server:
        assert codes(server) == {"no-own-region", "refused"}


GONE: Final = {
    "no-answer": DeadlineExceededError("the server did not answer before the deadline"),
    "server-not-reachable": ServerUnavailableError("the connection broke"),
}


@pytest.mark.parametrize("code", GONE)
def test_a_server_that_does_not_answer_when_memory_is_registered(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise GONE[code]

    with Server(config("m")) as server:
        server.probed = reports({})
        monkeypatch.setattr(server, "register", fail)
        told = examination.examine(server)
    assert code in {each.trouble.code for each in told.findings}
    assert "other-namespace" not in {each.trouble.code for each in told.findings}
    assert not any("of its own" in line for _, line in told.fine)


def test_a_server_that_goes_when_it_is_asked_for_its_models(tmp_path: Path) -> None:
    with answering(pages([]), answers=lambda path, _: b"" if path == "/v2/repository/index" else None) as url:
        assert [each.trouble.code for each in examination.examine(url).findings] == ["server-not-reachable"]


def test_an_older_version_whose_process_is_dead() -> None:
    def answer(path: str, _: bytes) -> bytes | None:
        if not path.endswith("/infer"):
            return None
        said = (
            b'{"error":"Stub process \'m_0_0\' is not healthy."}' if "/versions/1/" in path else b'{"error":"KeyError"}'
        )
        return b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)

    with answering(pages([READY, {**READY, "version": "2"}]), answers=answer) as url:
        told = examination.examine(url).findings
    assert [each.found for each in told if each.trouble.code == "dead-instance"] == [
        "1 of 1 requests to version 1, one after another, met a dead process"
    ]
