"""What a server answers: a descriptor to whom asks rightly and may have it, and nothing to others, nor to crowds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from shm_backend_utils.memory.descriptors import PRIVATE, Access, Descriptor, no_descriptors
from shm_backend_utils.memory.handover import peers, server
from shm_backend_utils.memory.handover.peers import Peer
from shm_backend_utils.memory.handover.server import HandoverRegistry
from shm_backend_utils.memory.locks import hold_owner_lease, is_owner_alive
from shm_backend_utils.protocol.handover import (
    Question,
    SealedKey,
    decode_answer,
    encode_answer,
    encode_question,
    parse_sealed_key,
)
from tests.unit.handover.asking import (
    CONTENT,
    LONG_S,
    TOKEN,
    Region,
    a_lingering_socket,
    ask,
    connect,
    count_open,
    reply_to,
    settles,
)

REFUSED = encode_answer(is_given=False)


def test_what_is_given_has_none_of_our_locks(registry: HandoverRegistry) -> None:
    region = Region(registry)
    hold_owner_lease(region.memory.fileno())
    given = ask(region.key)
    assert given is not None
    fcntl.fcntl(given.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    assert is_owner_alive(given.fileno())


def right(key: SealedKey) -> bytes:
    return encode_question(Question(key.number, TOKEN))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key: encode_question(Question(key.number, b"another's token!")),
        lambda key: encode_question(Question(key.number + 1, TOKEN)),
        *(lambda _: b"x", lambda _: bytes(40), lambda _: bytes(4096)),
        *(lambda key: right(key) + b"\0", lambda key: right(key) + bytes(8), lambda key: right(key)[:-1]),
    ],
)
def test_a_wrong_question_is_refused(wrong: Callable[[SealedKey], bytes], registry: HandoverRegistry) -> None:
    region = Region(registry)
    assert reply_to(region.key, wrong(region.key)) == REFUSED
    assert region.is_given()


def test_what_was_withdrawn_is_given_no_longer(registry: HandoverRegistry) -> None:
    kept, region = Region(registry), Region(registry)
    assert region.is_given()
    registry.withdraw(region.number)
    assert not region.is_given()
    assert kept.is_given()


def test_what_is_withdrawn_while_it_is_opened_or_cannot_be_opened_is_not_given(registry: HandoverRegistry) -> None:
    kept, other = Region(registry), Region(registry)

    def withdrawn() -> Descriptor:
        registry.withdraw(region.number)
        return other.copy()

    def refused() -> Descriptor:
        raise no_descriptors("a region takes one")

    region = Region(registry, copy=withdrawn)
    for each in (region, Region(registry, copy=refused)):
        assert ask(each.key) is None
    assert kept.is_given()


def test_who_hangs_up_at_once_is_in_nobodys_way(registry: HandoverRegistry) -> None:
    region = Region(registry)
    connect(region.key).close()
    with connect(region.key) as connection:
        connection.send(right(region.key))  # and does not wait for the answer
    assert region.is_given()


def test_only_the_first_of_two_questions_is_answered(registry: HandoverRegistry) -> None:
    kept, region = Region(registry), Region(registry)
    before = count_open()
    for _ in range(20):
        assert reply_to(region.key, right(kept.key), right(region.key)) in (None, encode_answer(is_given=True))
    assert kept.is_given()
    assert settles(lambda: count_open() == before)


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have descriptors sent along as before Linux 6.16."""
    monkeypatch.setattr(peers, "_SO_PASSRIGHTS", 0x7FFF)


@pytest.mark.usefixtures("old_kernel")
def test_descriptors_sent_along_are_refused_on_an_old_kernel(registry: HandoverRegistry) -> None:
    region = Region(registry)
    before = count_open()
    for _ in range(20):
        with connect(region.key) as connection:
            socket.send_fds(connection, [right(region.key)], [0, 1, 2])
            with contextlib.suppress(ConnectionError):
                assert connection.recv(4096) == REFUSED
    assert region.is_given()
    assert settles(lambda: count_open() == before)


@pytest.mark.usefixtures("old_kernel")
@pytest.mark.parametrize("before", [0, 1], ids=["with the question", "behind it"])
def test_a_socket_that_lingers_holds_nobody_up(before: int, registry: HandoverRegistry) -> None:
    region, may_go_on = Region(registry), threading.Event()

    def copy() -> Descriptor:
        may_go_on.wait(LONG_S)
        return region.copy()

    key = Region(registry, copy=copy).key
    with a_lingering_socket() as (slow, other):
        with connect(key) as busy, connect(region.key) as connection:
            busy.send(right(key))
            for _ in range(before):
                connection.send(right(region.key))
            socket.send_fds(connection, [right(region.key)], [slow.fileno()])
            slow.close()  # while the server is busy, so that it has the last descriptor
            may_go_on.set()
            assert [region.is_given() for _ in range(5)] == [True] * 5
        other.close()


NOBODY = 65534
GROUP = 4242
# Asks as another user. It reads the region to show that it has it.
ASKING = """
import os, sys
from tests.unit.handover.asking import ask
from shm_backend_utils.protocol.handover import parse_sealed_key

user, group, further = map(int, sys.argv[2:])
os.setgroups([further])
os.setgid(group)
os.setuid(user)
try:
    given = ask(parse_sealed_key(sys.argv[1]), {token!r})
except ConnectionError:
    print("broken off")
else:
    print("refused" if given is None else os.pread(given.fileno(), 100, 0).decode())
"""

as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def asked_by(region: Region, user_id: int, group_id: int = NOBODY, further: int = NOBODY) -> str:
    program = [
        sys.executable,
        "-c",
        ASKING.format(token=TOKEN),
        str(region.key),
        *map(str, (user_id, group_id, further)),
    ]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


@as_another_user
@pytest.mark.parametrize(
    ("access", "asking", "answer"),
    [
        (PRIVATE, (NOBODY,), "broken off"),  # not even heard
        (PRIVATE, (0,), CONTENT.decode()),
        (Access(0o666), (NOBODY,), CONTENT.decode()),
        (Access(0o660, GROUP), (NOBODY, GROUP), CONTENT.decode()),
        (Access(0o660, GROUP), (NOBODY, NOBODY, GROUP), CONTENT.decode()),  # of the group among others
        (Access(0o660, GROUP), (NOBODY, GROUP + 1, GROUP + 1), "broken off"),
    ],
)
def test_who_is_given_what(access: Access, asking: tuple[int, ...], answer: str, registry: HandoverRegistry) -> None:
    assert asked_by(Region(registry, access), *asking) == answer


@as_another_user
def test_who_is_given_something_is_given_nothing_else(registry: HandoverRegistry) -> None:
    private, _ = Region(registry), Region(registry, Access(0o666))
    assert asked_by(private, NOBODY) == "refused"


def test_who_is_at_the_other_end() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        assert Peer.of(here) == Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


ME = os.geteuid()
MINE = os.getegid()


@pytest.mark.parametrize(
    ("peer", "access", "may"),
    [
        (Peer(ME, frozenset()), PRIVATE, True),
        (Peer(0, frozenset()), PRIVATE, True),
        (Peer(ME + 1, frozenset({MINE})), PRIVATE, False),
        (Peer(ME + 1, frozenset({MINE})), Access(0o660), True),
        (Peer(ME + 1, frozenset({MINE})), Access(0o640), False),  # reading is not enough
        (Peer(ME + 1, frozenset({MINE})), Access(0o660, MINE + 1), False),
        (Peer(ME + 1, frozenset({MINE + 1})), Access(0o660, MINE + 1), True),
        (Peer(ME + 1, frozenset({MINE + 1})), Access(0o666), True),
        (Peer(ME + 1, frozenset({MINE})), Access(0o606), False),  # as with files
    ],
)
def test_who_may_open_what(peer: Peer, access: Access, may: bool) -> None:
    assert peer.may_open(access) is may


@pytest.mark.parametrize(
    "message",
    [b"", bytes(15), bytes(17), *(struct.pack("<8sII", *said) for said in ((b"shmbu-fx", 0, 0), (b"shmbu-fd", 2, 0)))],
    ids=["nothing", "short", "long", "another magic", "another status"],
)
def test_what_is_no_answer_is_none(message: bytes) -> None:
    assert decode_answer(message) is None


# Crowds, and no descriptors for them


CROWD, LARGE_CROWD = 1_500, 10_000
NEVER_S = 1e6


def is_broken_off(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_who_says_nothing_is_waited_for_a_while_and_others_are_served(registry: HandoverRegistry) -> None:
    region = Region(registry)
    with connect(region.key) as silent:
        assert region.is_given()
        assert silent.recv(1) == b""


def test_the_oldest_of_many_silent_ones_make_way(registry: HandoverRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SILENCE_S", NEVER_S)
    region = Region(registry)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(region.key)) for _ in range(server._MOST_SILENT + 5)]
        assert region.is_given()  # they have been accepted before
        assert [is_broken_off(each) for each in silent] == [True] * 5 + [False] * server._MOST_SILENT


@pytest.mark.parametrize("speaks", [True, False], ids=["garbage", "silent"])
def test_a_crowd_holds_nobody_up(speaks: bool, registry: HandoverRegistry, request: pytest.FixtureRequest) -> None:
    region = Region(registry)
    before = count_open()
    for number in range(LARGE_CROWD if request.config.getoption("--all") else CROWD):
        with connect(region.key) as connection:
            if speaks:
                with contextlib.suppress(ConnectionError):
                    connection.send(b"garbage")
        if number % 500 == 0:
            assert region.is_given()
    assert region.is_given()
    assert settles(lambda: count_open() <= before)


# A process with hardly any descriptors, which offers a region until its input ends.
SHORT = """
import resource, sys
from tests.unit.handover.asking import Region, count_open
from shm_backend_utils.memory.handover.server import HandoverRegistry

registry = HandoverRegistry()
region = Region(registry)
resource.setrlimit(resource.RLIMIT_NOFILE, (count_open() + 2, 4096))
print(region.key, flush=True)
sys.stdin.read()
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))  # glibc opens a library for a thread that ends with Python
registry.withdraw(region.number)
"""


def test_a_process_without_descriptors_waits_and_serves_when_it_has_some() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SHORT], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        key = parse_sealed_key(process.stdout.readline().strip())
        assert key is not None
        silent = [connect(key) for _ in range(20)]
        assert silent[0].recv(1) == b""  # they make way
        for each in silent:
            each.close()
        assert settles(lambda: ask(key) is not None)
        process.communicate(timeout=LONG_S)
    assert process.returncode == 0
