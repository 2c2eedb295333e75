"""Clients that hang: each costs a request a refusal, and never the session its life nor other clients their turn."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover import peers
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.handover.peers import Closer
from shm_backend_utils.protocol.handover import QUESTION_LENGTH, SealedKey, encode_answer
from tests.unit.fetching.conftest import FIELD, TOKEN, ScriptedServer, give, memfd, say_nothing

NOBODY = 65534
BOUND_S = 0.2
TOO_LATE = "its client did not hand it over within"


@pytest.fixture
def hasty() -> Fetcher:
    """One that waits for a short time only."""
    return Fetcher(BOUND_S)


def fetch(fetcher: Fetcher, key: SealedKey) -> None:
    with fetcher.fetch(key, TOKEN, FIELD, lambda uid: True):
        pass


def refused(fetcher: Fetcher, key: SealedKey, match: str) -> None:
    with pytest.raises(RegionRefusedError, match=match):
        fetch(fetcher, key)


def test_who_accepts_and_says_nothing_is_refused_and_nobody_else_is_charged(hasty: Fetcher) -> None:
    with ScriptedServer(say_nothing) as hanging, ScriptedServer(give(memfd())) as honest:
        for _ in range(2):
            refused(hasty, hanging.key, TOO_LATE)
        fetch(hasty, honest.key)


def test_who_never_accepts_is_refused(hasty: Fetcher) -> None:
    key = SealedKey(secrets.token_hex(16), 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(key.socket_address)
        listener.listen()
        refused(hasty, key, TOO_LATE)


@pytest.fixture
def full() -> Iterator[tuple[SealedKey, socket.socket]]:
    """Where nobody more can wait to be accepted."""
    key = SealedKey(secrets.token_hex(16), 1)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(key.socket_address)
        listener.listen(0)
        waiting = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
        waiting.connect(key.socket_address)
        yield key, listener


def test_a_crowd_before_it_is_told(hasty: Fetcher, full: tuple[SealedKey, socket.socket]) -> None:
    refused(hasty, full[0], "accepts no connections, and its backlog is full")
    with ScriptedServer(give(memfd())) as honest:
        fetch(hasty, honest.key)


def test_who_has_room_again_is_asked(fetcher: Fetcher, full: tuple[SealedKey, socket.socket]) -> None:
    key, listener = full
    region = memfd()

    def serve() -> None:
        time.sleep(0.02)  # most often, somebody waits for room by now; if not, the test proves less
        listener.accept()[0].close()
        with listener.accept()[0] as connection:
            give(region)(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    fetch(fetcher, key)
    thread.join()


def test_while_too_much_waits_to_be_closed_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closer, "waiting", peers.MOST_WAITING)
    with ScriptedServer(give()) as server:
        refused(Fetcher(BOUND_S, Closer()), server.key, f"still closing {peers.MOST_WAITING} earlier")


def test_of_whom_is_not_allowed_nothing_is_asked(fetcher: Fetcher) -> None:
    heard = []

    def script(connection: socket.socket) -> None:
        heard.append(connection.recv(QUESTION_LENGTH))

    with ScriptedServer(script) as server, pytest.raises(RegionRefusedError, match="whom the model's SHM_ALLOWED_UIDS"):
        fetcher.fetch(server.key, TOKEN, FIELD, lambda uid: False)
    assert heard == [b""]


def has_pass_rights() -> bool:
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            return tried.setsockopt(socket.SOL_SOCKET, peers._SO_PASSRIGHTS, 0) is None
        except OSError:
            return False


needs_pass_rights = pytest.mark.skipif(not has_pass_rights(), reason="Linux has SO_PASSRIGHTS from 6.16 on")


@needs_pass_rights
def test_who_is_not_allowed_can_send_no_descriptors(fetcher: Fetcher) -> None:
    sent, region = [], memfd()

    def script(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(connection, [encode_answer(is_given=True)], [region.fileno()], socket.MSG_NOSIGNAL)
            sent.append(True)
        connection.recv(1)

    def is_allowed(_: int) -> bool:
        time.sleep(0.05)  # in which the descriptor would come
        return False

    with ScriptedServer(script) as server, pytest.raises(RegionRefusedError):
        fetcher.fetch(server.key, TOKEN, FIELD, is_allowed)
    assert sent == []


class NotingCloser(Closer):
    """One that counts what it is given."""

    count = 0

    def close(self, what: socket.socket | Descriptor) -> None:
        self.count += 1
        super().close(what)


@pytest.mark.parametrize(
    ("option", "count"),
    [
        pytest.param(peers._SO_PASSRIGHTS, 0, marks=needs_pass_rights),  # a kernel that lets him send nothing
        (0x7FFF, 1),
    ],
)
def test_what_strangers_send_counts_until_closed(option: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SO_PASSRIGHTS", option)
    closer = NotingCloser()
    with ScriptedServer(give()) as server, pytest.raises(RegionRefusedError, match="SHM_ALLOWED_UIDS"):
        Fetcher(BOUND_S, closer).fetch(server.key, TOKEN, FIELD, lambda uid: False)
    assert closer.count == count


ANOTHER_USER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(bytes.fromhex(sys.argv[2]))
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
sys.exit(len(connection.recv(100)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_known_by_his_id(fetcher: Fetcher) -> None:
    key = SealedKey(secrets.token_hex(16), 1)
    asked: list[int] = []

    def is_allowed(uid: int) -> bool:
        asked.append(uid)
        return uid == 0

    arguments = [sys.executable, "-c", ANOTHER_USER, str(NOBODY), key.socket_address.hex()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "listens\n"
        with pytest.raises(RegionRefusedError, match=f"belongs to user {NOBODY}, whom the model's SHM_ALLOWED_UIDS"):
            fetcher.fetch(key, TOKEN, FIELD, is_allowed)
    assert asked == [NOBODY]
    assert child.returncode == 0  # it has heard nothing
