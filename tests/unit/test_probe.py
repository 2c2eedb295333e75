"""The probe: a session answers it in the client's memory, and says nothing of itself anywhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils import dtypes
from shm_backend_utils.errors import TableError
from shm_backend_utils.memory.managed import RegionKind
from shm_backend_utils.model import ShmSession, context
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.probe import decode_probe, digest_of, encode_probe, is_probe
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from tests.unit import emulated
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

UINT8 = dtypes.BY_NAME["UINT8"]
NONCE = bytes(range(32))
ROOM = 8192
PROBE_WORD = 14  # in a table without its generation


def never(call: Any) -> None:
    raise AssertionError("model.py must not see a probe")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters={"SHM_PATHS": "direct"}) as session:
        yield session


@pytest.fixture(params=[RegionKind.SYSTEM, RegionKind.SEALED])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(kind=request.param)
    yield client
    client.close()


def probe_of(client: Client, *, room: int = ROOM, with_gpus: bool = False) -> bytes:
    client.region.bytes()[client.data : client.data + len(NONCE)] = np.frombuffer(NONCE, np.uint8)
    nonce = InputSpan(UINT8, (len(NONCE),), 0, client.data, len(NONCE))
    return encode_probe(nonce, OutputSpan(0, client.data + 256, room), with_gpus=with_gpus)


def refusal(session: ShmSession, request: Any) -> str:
    return emulated.error_of(session, request, never)


def ask(session: ShmSession, client: Client, **more: Any) -> str:
    return refusal(session, emulated.delivered(client.begin(probe_of(client, **more))))


def report_in(client: Client) -> dict[str, Any]:
    text = client.region.bytes()[client.data + 256 : client.data + 256 + ROOM].tobytes().partition(b"\0")[0]
    report: dict[str, Any] = json.loads(text)
    return report


def test_the_session_has_read_the_nonce_and_says_what_it_is(session: ShmSession, client: Client) -> None:
    request = emulated.delivered(client.begin(probe_of(client)))
    text = refusal(session, request)
    report = report_in(client)
    assert report["digest"] == digest_of(NONCE)
    assert (report["version"], report["protocol"]) == (shm_backend_utils.__version__, 2)
    assert (report["pid"], report["uid"]) == (os.getpid(), os.geteuid())
    assert report["numpy"] == np.__version__
    assert report["gpus"] is None
    assert text.startswith("shm:probed: ")
    for said in (report["digest"], str(report["pid"]), report["boot_id"]):
        assert said not in text
    assert client.is_over()
    assert not client.has_results()
    assert refusal(session, request).startswith("shm:replayed: "), "it is answered once"
    assert client.is_free()
    ask(session, client, with_gpus=True)
    assert report_in(client)["gpus"]["uuids"] or report_in(client)["gpus"]["obstacle"]
    served = client.request({"X": np.arange(3, dtype=np.float32)}, {"Y": 12})
    session.serve([served], lambda call: call.put("Y", call.input("X").numpy() + 1))
    np.testing.assert_array_equal(client.output("Y"), [1, 2, 3])


def test_a_probe_that_was_given_up_is_stale(session: ShmSession, client: Client) -> None:
    request = emulated.delivered(client.begin(probe_of(client)))
    client.region.record(0).generation = 2
    assert refusal(session, request).startswith("shm:stale: ")
    assert client.is_free()
    with pytest.raises(ValueError, match="Expecting value"):
        report_in(client)


def test_a_failed_report_is_an_end(session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("anything")

    assert "outputs[0].byte_size: found 16, expected" in ask(session, client, room=16)
    assert (client.is_free(), client.is_over()) == (True, True), "else it seems that the model has died with it"
    monkeypatch.setattr(context, "process_facts", fail)
    ask(session, client)
    assert (client.is_free(), client.is_over()) == (True, True)


@pytest.mark.parametrize(
    "said",
    [
        Table({}, {}),
        Table({name: InputSpan(UINT8, (32,), 0, 8192, 32) for name in "NM"}, {"R": OutputSpan(0, 8448, 64)}),
        Table({"N": InputSpan(UINT8, (8,), 0, 8192, 8)}, {"R": OutputSpan(0, 8448, 64)}),
        Table({"N": InputSpan(dtypes.BY_NAME["FP32"], (8,), 0, 8192, 32)}, {"R": OutputSpan(0, 8448, 64)}),
        Table({"N": InputSpan(UINT8, (32,), 0, 8192, 32)}, {"R": OutputSpan(0, 8448, 64)}, ring=Ring(0, 1, 0)),
    ],
)
def test_a_probe_of_another_form_is_refused(session: ShmSession, client: Client, said: Table) -> None:
    encoded = bytearray(table.encode(said))
    encoded[PROBE_WORD] = 1
    assert refusal(session, emulated.delivered(client.begin(bytes(encoded)))).startswith("shm:table: probe: found ")
    assert client.is_free()


def test_a_probe_of_other_numbers_or_places_is_none() -> None:
    nonce = InputSpan(UINT8, (32,), 0, 8192, 32)
    for word in (0, 3, 255):
        made = bytearray(encode_probe(nonce, OutputSpan(0, 8448, 1024), with_gpus=False))
        made[PROBE_WORD] = word
        assert not is_probe(bytes(8) + made)
    nonce = InputSpan(UINT8, (32,), 0, 100, 32)
    with pytest.raises(TableError, match=r"inputs\[0\]"):
        decode_probe(bytes(8) + encode_probe(nonce, OutputSpan(0, 8448, 64), with_gpus=True), 8192, 16384)
