"""Who may fetch a region: whom the kernel would let open a file with its access."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from shm_backend_utils.memory.access import PRIVATE, Access
from shm_backend_utils.memory.handover.office import Office
from shm_backend_utils.memory.handover.peers import Peer
from tests.unit.handover.asking import CONTENT, TOKEN, Region

NOBODY = 65534
GROUP = 4242
OTHER_GROUP = 4343

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
def test_another_user_gets_nothing_and_is_not_even_heard(office: Office) -> None:
    region = Region(office)
    assert asked_by(region, NOBODY) == "broken off"
    assert asked_by(region, 0) == CONTENT.decode()


@as_another_user
def test_another_user_gets_what_is_everybodys_and_nothing_else(office: Office) -> None:
    private, public = Region(office), Region(office, Access(0o666))
    assert asked_by(public, NOBODY) == CONTENT.decode()
    assert asked_by(private, NOBODY) == "refused"


@as_another_user
@pytest.mark.parametrize(
    ("group_id", "further", "answer"),
    [
        (GROUP, NOBODY, CONTENT.decode()),
        (NOBODY, GROUP, CONTENT.decode()),
        (OTHER_GROUP, OTHER_GROUP, "broken off"),
    ],
    ids=["of the group", "of the group among others", "of another group"],
)
def test_whom_the_group_admits(group_id: int, further: int, answer: str, office: Office) -> None:
    region = Region(office, Access(0o660, GROUP))
    assert asked_by(region, NOBODY, group_id, further) == answer


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
