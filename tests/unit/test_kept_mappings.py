"""What a model keeps from request to request: mappings, and names. They do not lie, and there is an end to them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping import resolver
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.opened import open_region
from tests.unit.emulated import delivered, message_of
from tests.unit.sessions import double, say_registered, session_of, tensor
from tests.unit.table_client import Client

SLOTS = 2
SHM: Final = Path("/dev/shm")
MANY = 100
X: Final = np.arange(4, dtype=np.float32)


def code_of(session: ShmSession, request: InferenceRequest) -> str:
    (response,) = session.serve([request], double)
    return message_of(response).partition(": ")[0]


def answer(session: ShmSession, client: Client, value: float = 1, slot: int = 0) -> str:
    code = code_of(session, client.request({"X": X + value}, {"Y": 16}, slot))
    assert code or client.output("Y", slot).tolist() == (2 * (X + value)).tolist()
    return code


def resolver_of(session: ShmSession) -> Resolver:
    return session._open_context().resolver


def mapped(session: ShmSession) -> int:
    return resolver_of(session).registry.mapped()[1]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def clone(region: ManagedRegion, header: bytes | None = None) -> None:
    path = SHM / region.segment.key
    content = path.read_bytes()
    path.unlink()
    path.write_bytes((header or content[:4096]) + content[4096:])


def test_a_file_that_replaces_another_under_its_key_is_mapped_anew(session: ShmSession, client: Client) -> None:
    assert answer(session, client) == ""
    clone(client.region)
    request = delivered({"shm_slot": client.address(), "shm_generation": 1}, ["Y"])
    (response,) = session.serve([request], double)
    assert message_of(response).startswith("shm:replayed: ")  # the copy's own record was read, not the old memory's
    fresh = open_region(client.region.segment.key, client.region.header.token.hex(), "region")
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


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    """A session that does not ask what a name stands for as long as its file is there."""
    trusted = {"SHM_REGISTRATIONS": "trusted"}
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], parameters=trusted) as session:
        yield session


def test_addresses_that_are_refused_are_not_kept(session: ShmSession, client: Client) -> None:
    for number in range(MANY):
        wrong = f"2/m/shmbu-{number}-00/{number:032x}/0"
        assert code_of(session, delivered({"shm_slot": wrong, "shm_generation": 1}, ["Y"])) == "shm:gone"
        wrong = client.address().replace(client.region.header.token.hex(), f"{number:032x}")
        assert code_of(session, delivered({"shm_slot": wrong, "shm_generation": 1}, ["Y"])) == "shm:refused"
        other = f"2/other{number}/shmbu-1-00/{'0' * 32}/0"
        assert code_of(session, delivered({"shm_slot": other, "shm_generation": 1}, ["Y"])) == "shm:missing"
    registry = resolver_of(session).registry
    assert (registry.slots, registry.names, registry.mapped()[1]) == ({}, {}, 0)


class Server(dict[str, Registration]):
    """What is registered, and how often that was asked for."""

    asked, is_silent = 0, False

    def registrations(self) -> dict[str, Registration]:
        self.asked += 1
        if self.is_silent:
            raise MachineError("the server does not answer")
        return self

    def register(self, name: str, value: float) -> str:
        key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
        (SHM / key).write_bytes(np.full(4, value, np.float32).tobytes() + bytes(4080))
        self[name] = Registration(key, 0, 4096)
        return key


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    say_registered(monkeypatch, server.registrations)
    monkeypatch.setattr(resolver, "SWEEP_INTERVAL_S", 3600.0)  # the tests sweep by themselves
    yield server
    for path in SHM.glob(f"foreign-{os.getpid()}-*"):
        path.unlink()


def named(name: str) -> InferenceRequest:
    tensors = {"inputs": {"X": [0, 0, 16, "FP32", [4]]}, "outputs": {"Y": [0, 256, 16]}}
    said: dict[str, Any] = {"v": 1, "model": "m", "regions": [{"kind": "named", "name": name}], **tensors}
    return delivered({"shm_io": json.dumps(said)}, ["Y"])


def output_of(key: str) -> float:
    return float(np.frombuffer((SHM / key).read_bytes(), np.float32)[64])


def kept(session: ShmSession) -> tuple[int, int, int]:
    found = resolver_of(session)
    return len(found._named._known), len(found.registry.names), found.registry.mapped()[1]


def test_every_request_asks_unless_it_trusts(session: ShmSession, trusting: ShmSession, server: Server) -> None:
    server.register("mine", 3)
    for each, count in ((session, 5), (trusting, 1)):
        server.asked = 0
        assert [code_of(each, named("mine")) for _ in range(5)] == [""] * 5
        assert (server.asked, kept(each)) == (count, (1, 1, 1))


def test_another_file_counts_at_once_or_later(session: ShmSession, trusting: ShmSession, server: Server) -> None:
    for each in (session, trusting):
        old = server.register("mine", 3)
        assert code_of(each, named("mine")) == ""
        new = server.register("mine", 5)
        if each is trusting:
            resolver_of(each).sweep()
        before = (SHM / old).read_bytes()
        assert code_of(each, named("mine")) == ""
        assert (SHM / old).read_bytes() == before
        assert output_of(new) == 10
        assert kept(each)[0] == 1
        server.clear()
        if each is session:
            assert code_of(each, named("mine")) == "shm:gone"
        resolver_of(each).sweep()
        assert code_of(each, named("mine")) == "shm:gone"
        assert kept(each) == (0, 0, 0)


def test_a_key_means_the_file_that_has_it_now(trusting: ShmSession, session: ShmSession, server: Server) -> None:
    for number, each in enumerate((trusting, session)):
        key = server.register("mine", 3)
        assert code_of(each, named("mine")) == ""
        kept_file = (SHM / key).rename(SHM / f"foreign-{os.getpid()}-kept-{number}")
        before = kept_file.read_bytes()
        (SHM / key).write_bytes(np.full(4, 5, np.float32).tobytes() + bytes(4080))
        assert code_of(each, named("mine")) == ""
        assert output_of(key) == 10
        assert kept_file.read_bytes() == before


def test_a_name_is_not_trusted_without_an_answer(trusting: ShmSession, session: ShmSession, server: Server) -> None:
    for each in (trusting, session):
        key = server.register("mine", 3)
        assert code_of(each, named("mine")) == ""
        if each is trusting:
            (SHM / key).unlink()
            key = server.register("mine", 5)
            assert code_of(each, named("mine")) == ""
            assert output_of(key) == 10
        before = (SHM / key).read_bytes()
        server.is_silent = True
        if each is trusting:
            with pytest.raises(MachineError):
                resolver_of(each).sweep()
        assert code_of(each, named("mine")) == "shm:machine"
        assert (SHM / key).read_bytes() == before
        assert kept(each) == ((0, 0, 0) if each is trusting else (1, 1, 1))
        assert not any(region.is_in_use for region in resolver_of(each).registry.names.values())
        server.is_silent = False
        assert code_of(each, named("mine")) == ""


def test_a_truncated_file_that_grows_gets_its_memory_back(session: ShmSession, server: Server) -> None:
    key = server.register("mine", 3)
    assert code_of(session, named("mine")) == ""
    os.truncate(SHM / key, 0)
    assert code_of(session, named("mine")) == "shm:refused"
    os.truncate(SHM / key, 4096)
    assert code_of(session, named("mine")) == ""
    assert (SHM / key).stat().st_blocks * 512 == 4096


def test_names_that_come_and_go_or_that_nobody_registered_leave_nothing(session: ShmSession, server: Server) -> None:
    for number in range(MANY):
        assert code_of(session, named(f"nobody's {number}")) == "shm:gone"
    assert kept(session) == (0, 0, 0)
    for number in range(MANY):
        key = server.register(f"mine {number}", number)
        assert code_of(session, named(f"mine {number}")) == ""
        assert output_of(key) == 2 * number
        server.clear()
        if number % 2:
            (SHM / key).unlink()
        if number % 50 == 49:
            resolver_of(session).sweep()
            assert kept(session) == (0, 0, 0)


def test_many_names_of_one_file_are_one_mapping(session: ShmSession, server: Server) -> None:
    key = server.register("0", 1)
    for number in range(MANY):
        server[str(number)] = Registration(key, 0, 4096)
        assert code_of(session, named(str(number))) == ""
    assert kept(session) == (MANY, 1, 1)
    server.clear()
    resolver_of(session).sweep()
    assert kept(session) == (0, 0, 0)
