"""The one thing that a model keeps from request to request: mappings. They do not lie, and there is an end to them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping.resolver import Resolver
from tests.unit.emulated import delivered, message_of
from tests.unit.sessions import double, session_of, tensor
from tests.unit.table_client import Client

SLOTS = 2
SHM = Path("/dev/shm")
MANY = 128
X = np.arange(4, dtype=np.float32)


def answer(session: ShmSession, client: Client, value: float = 1, slot: int = 0) -> str:
    """Have a request doubled; return the error's code, or nothing if the answer is right."""
    request = client.request({"X": X + value}, {"Y": 16}, slot)
    (response,) = session.serve([request], double)
    if response.has_error():
        return message_of(response).partition(": ")[0]
    assert client.output("Y", slot).tolist() == (2 * (X + value)).tolist()
    return ""


def resolver_of(session: ShmSession) -> Resolver:
    return session._open_context().resolver


def mapped(session: ShmSession) -> int:
    return resolver_of(session).registry.mapped()[1]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def clone(region: ManagedRegion, header: bytes | None = None) -> None:
    """Put another file of the same content under the key of a region."""
    path = SHM / region.segment.key
    content = path.read_bytes()
    path.unlink()
    path.write_bytes((header or content[:4096]) + content[4096:])


# Lies


def test_a_file_that_replaces_another_under_its_key_is_mapped_anew(session: ShmSession, client: Client) -> None:
    assert answer(session, client) == ""
    clone(client.region)
    request = delivered({"shm_slot": client.address(), "shm_generation": 1}, ["Y"])
    (response,) = session.serve([request], double)
    assert message_of(response).startswith("shm:replayed: ")  # the copy's own record was read, not the old memory's
    fresh = ManagedRegion.open(client.region.segment.key, client.region.header.token.hex(), "region")
    fresh.record(0).generation = 5
    said = client.region.bytes()[4096 + 8 : 4096 + 2048].tobytes()
    fresh.record(0).begin(5, said)
    (response,) = session.serve([delivered({"shm_slot": client.address(), "shm_generation": 5}, ["Y"])], double)
    assert response.error() is None
    assert (fresh.record(0).completed, client.region.record(0).completed) == (5, 1)
    fresh.close()
    (SHM / client.region.segment.key).unlink()


def test_a_token_that_is_not_the_regions_is_refused(session: ShmSession, client: Client) -> None:
    assert answer(session, client) == ""
    wrong = client.address().replace(client.region.header.token.hex(), "0" * 32)
    (response,) = session.serve([delivered({"shm_slot": wrong, "shm_generation": 1}, ["Y"])], double)
    assert message_of(response) == "shm:refused: shm_slot refused: the token is not the region's"
    assert answer(session, client) == ""
    header = bytearray((SHM / client.region.segment.key).read_bytes()[:4096])
    header[24:40] = bytes(16)
    clone(client.region, bytes(header))  # another file under its key
    assert answer(session, client) == "shm:refused"
    assert mapped(session) == 0
    (SHM / client.region.segment.key).unlink()


def test_slots_of_one_region_are_not_taken_for_each_other(session: ShmSession, client: Client) -> None:
    for value in range(10):
        assert answer(session, client, value, value % 2) == ""
    assert mapped(session) == 1


# The end


def test_a_region_that_is_swept_during_a_call_goes_after_it(session: ShmSession, client: Client) -> None:
    before = descriptors()
    seen: list[int] = []

    def infer(call: Call) -> None:
        client.region.segment.unlink()
        resolver_of(session).sweep()
        seen.append(mapped(session))
        double(call)

    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], infer)
    assert response.error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]
    assert (seen, mapped(session), descriptors()) == ([1], 0, before)


def test_many_regions_are_mapped_and_go_with_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    limit = str(64 << 20)
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters={"SHM_MAX_MAPPED_BYTES": limit}) as session:
        for count in range(MANY):
            client = Client(share=4096)
            assert answer(session, client, count) == ""
            client.close()
            if count % 100 == 0:
                assert mapped(session) <= 2
        assert len(resolver_of(session).registry.slots) <= 1
        resolver_of(session).sweep()
        assert (mapped(session), len(resolver_of(session).registry.slots)) == (0, 0)
    assert descriptors() == before


def test_many_regions_that_live_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(Client(share=4096))) for _ in range(40)]
        parameters = {"SHM_MAX_MAPPED_BYTES": str(10 * clients[0].region.header.byte_size)}
        with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters=parameters) as session:
            for client in 3 * clients:
                assert answer(session, client) == ""
                assert mapped(session) <= 10
            assert len(resolver_of(session).registry.slots) == 10
