"""A handover server that does what a test says; and every test leaves as many descriptors open as there were."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.protocol.handover import QUESTION_LENGTH, SealedKey, encode_answer

FIELD: Final = "regions[1]"
PAGE: Final = 4096
TOKEN: Final = "0123456789abcdef" * 2
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Script = Callable[[socket.socket], None]  # what a server does with a connection, which is closed afterwards


class ScriptedServer:
    """Serves connections one after another, in a thread of its own, from the block's begin to its end."""

    def __init__(self, script: Script) -> None:
        self.key = SealedKey(secrets.token_hex(16), 7)
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.key.socket_address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="scripted server")

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                self._script(connection)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # accept() ends
        self._thread.join()
        self._listener.close()


def give(*handed_over: Descriptor, answer: bytes = encode_answer(is_given=True)) -> Script:
    """Return a script that answers a question so, and then keeps nothing of what it has handed over."""

    def script(connection: socket.socket) -> None:
        if not connection.recv(QUESTION_LENGTH):
            return  # who has connected asks for nothing
        socket.send_fds(connection, [answer], [each.fileno() for each in handed_over], socket.MSG_NOSIGNAL)
        for each in handed_over:
            each.close()

    return script


def say_nothing(connection: socket.socket) -> None:
    """Wait until the other end is closed."""
    while connection.recv(QUESTION_LENGTH):
        pass


def memfd(seals: int = SEALS, byte_size: int = PAGE) -> Descriptor:
    """Return a memfd with all of its space, and with these seals alone."""
    made = Descriptor(os.memfd_create, "region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(made.fileno(), 0o600)
    os.posix_fallocate(made.fileno(), 0, byte_size)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, seals)
    return made


ENOUGH_S = 30.0


@pytest.fixture(autouse=True)
def _leaves_descriptors_level() -> Iterator[None]:
    before = count_open()
    yield
    deadline = time.monotonic() + 5
    while count_open() != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.002)  # the closer has a thread of its own
    assert count_open() == before


@pytest.fixture
def fetcher() -> Fetcher:
    """One that waits for as long as a slow machine needs."""
    return Fetcher(ENOUGH_S)


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
