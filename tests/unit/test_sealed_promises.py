"""What docs/protocol.md promises of sealed regions: how they are handed over, and what a model refuses to take."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from typing import Any, Final

import pytest

from shm_backend_utils.memory import locks
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.protocol.spans import Table
from tests.unit.emulated import delivered, error_code, message_of, start_server
from tests.unit.table_client import Client

DESK: Final = secrets.token_hex(16)  # others may run these tests, too
TOKEN: Final = "00112233445566778899aabbccddeeff"
QUESTION: Final = struct.pack("<8sIIQ16s", b"shmbu-fd", 2, 0, 7, bytes.fromhex(TOKEN))
GIVEN: Final = struct.pack("<8sII", b"shmbu-fd", 0, 0)
NOT_GIVEN: Final = struct.pack("<8sII", b"shmbu-fd", 1, 0)
PAGE: Final = 4096
SIZE: Final = 3 * PAGE
SEALS: Final = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
REFUSED: Final = ("shm:refused", "INVALID_ARG")
GONE: Final = ("shm:gone", "NOT_FOUND")
HandOver = Callable[[socket.socket], object]
"""What a client does with a connection on which it was asked."""


@pytest.fixture
def handover_s() -> str:
    """How long the model waits. A busy machine is no bug."""
    return "60"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, handover_s: str) -> Iterator[ShmSession]:
    start_server(monkeypatch)
    parameters = {"SHM_PATHS": {"string_value": "direct"}, "SHM_HANDOVER_S": {"string_value": handover_s}}
    config = {"name": "m", "input": [], "output": [], "parameters": parameters}
    with closing(ShmSession.from_args({"model_config": json.dumps(config)})) as session:
        yield session


def told(session: ShmSession, parameters: dict[str, Any]) -> tuple[str, str]:
    """Return the code of ours and Triton's that a request gets; empty ones if it is served."""

    def infer(call: Call) -> None:
        pass

    (response,) = session.serve([delivered(parameters, [])], infer)
    return (code_in(message_of(response)), error_code(response)) if response.has_error() else ("", "")


def told_of_what_is_handed_over(session: ShmSession, hand_over: HandOver) -> tuple[str, str]:
    """Return the same of a region whose client is as it likes."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0shmbu-fd-{DESK}")
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                listener.close()  # who finds the region removed looks for it once more
                asked.append(connection.recv(100))
                hand_over(connection)

        client = threading.Thread(target=answer)
        client.start()
        code = told(session, {"shm_slot": f"2/m/shmbu-fd-{DESK}-7/{TOKEN}/0", "shm_generation": 1})
        client.join()
    assert asked == [QUESTION]
    return code


def memfd(seals: int, mode: int = 0o600, space: int = SIZE) -> int:
    """Return a new one, with a header of one slot, and memory for so many bytes."""
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.truncate(fd, SIZE)
    os.posix_fallocate(fd, 0, space)
    os.pwrite(fd, struct.pack("<8sIIQ16sI", b"SHMBUREG", 2, 1, SIZE, bytes.fromhex(TOKEN), PAGE), 0)
    fcntl(fd, F_ADD_SEALS, seals)
    return fd


def giving(fd: int, message: bytes = GIVEN) -> HandOver:
    """Answer with the descriptor of an object, which is closed then. Other answers: tests/unit/fetching."""

    def hand_over(connection: socket.socket) -> None:
        socket.send_fds(connection, [message], [fd])
        os.close(fd)

    return hand_over


def test_one_socket_hands_out_many_regions_by_number(session: ShmSession) -> None:
    clients = [Client(kind=RegionKind.SEALED) for _ in range(2)]
    first, second = [parse_sealed_key(client.region.segment.key) for client in clients]
    assert first is not None
    assert second == first._replace(number=first.number + 1)
    for client in clients:
        assert told(session, client.begin(Table({}, {}))) == ("", "")
        client.close()


@pytest.mark.parametrize("is_opened_anew", [True, False])
def test_the_page_is_enough_to_hand_a_region_over(session: ShmSession, is_opened_anew: bool) -> None:
    """The model opens what it gets anew; else it would not see a lease of the same open file description."""
    fd = memfd(SEALS)
    locks.hold_owner_lease(fd)
    given = os.open(f"/proc/self/fd/{fd}", os.O_RDWR) if is_opened_anew else os.dup(fd)
    assert told_of_what_is_handed_over(session, giving(given)) == ("shm:stale", "CANCELLED")
    os.close(fd)


@pytest.mark.parametrize(
    "make",
    [
        lambda: giving(memfd(SEALS)),
        lambda: lambda connection: connection.close(),
        lambda: lambda connection: connection.send(NOT_GIVEN),
    ],
    ids=["it has no owner", "who hangs up has not got it", "who has not got it says so"],
)
def test_such_a_region_is_gone(session: ShmSession, make: Callable[[], HandOver]) -> None:
    assert told_of_what_is_handed_over(session, make()) == GONE
    assert told(session, {"shm_slot": f"2/m/shmbu-fd-{DESK}-7/{TOKEN}/0", "shm_generation": 1}) == GONE, (
        "nobody listens"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: giving(memfd(SEALS, mode=0o666)),
        lambda: giving(memfd(SEALS, space=PAGE)),
        lambda: giving(memfd(SEALS), message=GIVEN + b"\0"),
    ],
    ids=["everybody may write to it", "it has holes", "a long answer"],
)
def test_such_a_region_is_refused(session: ShmSession, make: Callable[[], HandOver]) -> None:
    assert told_of_what_is_handed_over(session, make()) == REFUSED
