"""What docs/protocol.md promises beyond tables and numbers: of requests, and of sealed regions."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.memory import locks
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.address import SlotAddress
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of, outputs_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    outputs = [tensor("Y"), tensor("Z"), tensor("N", "INT64"), tensor("S", "STRING")]
    with session_of(monkeypatch, [tensor("X"), tensor("WORDS", "STRING")], outputs) as session:
        yield session


@pytest.fixture(params=[RegionKind.SYSTEM, RegionKind.SEALED], ids=lambda kind: kind.value)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """One with a region of each kind."""
    client = Client(kind=request.param)
    yield client
    client.close()


def double(call: Call) -> None:
    x = call.input("X").numpy()
    call.put("Y", x * 2)
    call.put("Z", x * 3)
    call.put("N", np.array([x.size]))
    call.put("S", ["text"])


def answer(session: ShmSession, request: InferenceRequest, infer: Callable[[Call], None] = double) -> Any:
    (response,) = session.serve([request], infer)
    return response


def refusal(session: ShmSession, request: InferenceRequest, infer: Callable[[Call], None] = double) -> tuple[str, str]:
    """Return the code of ours and Triton's that a request is refused with."""
    response = answer(session, request, infer)
    assert response.has_error()
    return code_in(message_of(response)), error_code(response)


def stamps(client: Client) -> tuple[int, int]:
    record = client.region.record(0)
    return record.started, record.completed


NOT_BEGUN = (0, 0)
DONE = (1, 1)


# What is wanted, and where it is


def test_of_one_name_in_the_table_and_as_a_tensor_the_table_counts(session: ShmSession, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16}, delivered={"X": X + 100})
    assert answer(session, request).error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]


def test_the_table_is_no_list_of_outputs(session: ShmSession, client: Client) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    response = answer(session, delivered(parameters, ["Y", "Z", "N"]))
    assert set(client.places()) == {"Y", "Z", "N"}
    assert {name: array.tolist() for name, array in outputs_of(response).items()} == {"Z": [0, 3, 6, 9], "N": [4]}


def test_room_for_an_output_that_is_not_wanted_stays_unused(session: ShmSession, client: Client) -> None:
    said = client.laid_out({"X": X}, {"Y": 16, "Z": 16})
    before = client.region.bytes().tobytes()[said.outputs["Z"].offset :]
    response = answer(
        session, delivered(client.begin(said), ["Y"]), lambda call: call.put("Y", call.input("X").numpy())
    )
    assert (response.error(), outputs_of(response), set(client.places())) == (None, {}, {"Y"})
    assert client.region.bytes().tobytes()[said.outputs["Z"].offset :] == before


# What names a slot


def test_a_wrong_token_of_a_file_is_refused_and_not_called_gone(session: ShmSession, client: Client) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    parameters["shm_slot"] = str(SlotAddress("m", client.region.segment.key, "0" * 32, 0))
    is_sealed = parse_sealed_key(client.region.segment.key) is not None
    told = ("shm:gone", "NOT_FOUND") if is_sealed else ("shm:refused", "INVALID_ARG")
    assert refusal(session, delivered(parameters, ["Y"])) == told
    parameters["shm_slot"] = str(SlotAddress("m", "shmbu-none", "0" * 32, 0))
    assert refusal(session, delivered(parameters, ["Y"])) == ("shm:gone", "NOT_FOUND")
    assert stamps(client) == NOT_BEGUN


# What an error means for the slot


def test_a_model_that_fails_completes_the_generation_without_results(session: ShmSession, client: Client) -> None:
    def fail(call: Call) -> None:
        raise RuntimeError("shm:stale: of another request")

    response = answer(session, client.request({"X": X}, {"Y": 16}), fail)
    assert message_of(response) == "RuntimeError: shm:stale: of another request"
    assert code_in(message_of(response)) == ""
    assert stamps(client) == DONE
    assert not client.has_results()
    assert client.is_free()


def test_a_missing_input_is_found_out_after_the_start(session: ShmSession, client: Client) -> None:
    assert refusal(session, client.request({}, {"Y": 16})) == ("shm:missing", "INVALID_ARG")
    assert stamps(client) == DONE


# The region, and the rest


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
def sealed_session(monkeypatch: pytest.MonkeyPatch, handover_s: str) -> Iterator[ShmSession]:
    parameters = {"SHM_PATHS": "direct", "SHM_HANDOVER_S": handover_s}
    with session_of(monkeypatch, [], [], parameters=parameters) as session:
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


def test_one_socket_hands_out_many_regions_by_number(sealed_session: ShmSession) -> None:
    clients = [Client(kind=RegionKind.SEALED) for _ in range(2)]
    first, second = [parse_sealed_key(client.region.segment.key) for client in clients]
    assert first is not None
    assert second == first._replace(number=first.number + 1)
    for client in clients:
        assert told(sealed_session, client.begin(Table({}, {}))) == ("", "")
        client.close()


@pytest.mark.parametrize("is_opened_anew", [True, False])
def test_the_page_is_enough_to_hand_a_region_over(sealed_session: ShmSession, is_opened_anew: bool) -> None:
    """The model opens what it gets anew; else it would not see a lease of the same open file description."""
    fd = memfd(SEALS)
    locks.hold_owner_lease(fd)
    given = os.open(f"/proc/self/fd/{fd}", os.O_RDWR) if is_opened_anew else os.dup(fd)
    assert told_of_what_is_handed_over(sealed_session, giving(given)) == ("shm:stale", "CANCELLED")
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
def test_such_a_region_is_gone(sealed_session: ShmSession, make: Callable[[], HandOver]) -> None:
    assert told_of_what_is_handed_over(sealed_session, make()) == GONE
    assert told(sealed_session, {"shm_slot": f"2/m/shmbu-fd-{DESK}-7/{TOKEN}/0", "shm_generation": 1}) == GONE, (
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
def test_such_a_region_is_refused(sealed_session: ShmSession, make: Callable[[], HandOver]) -> None:
    assert told_of_what_is_handed_over(sealed_session, make()) == REFUSED
