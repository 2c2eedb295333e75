"""A region that is offered, and who asks for it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shm_backend_utils.memory.descriptors import PRIVATE, Access, Descriptor
from shm_backend_utils.memory.handover.server import HandoverRegistry
from shm_backend_utils.protocol.handover import Question, SealedKey, decode_answer, encode_question

LONG_S = 30.0
TOKEN = b"a region's token"
CONTENT = b"what is in the region"


class Region:
    """A region's memory, which a registry offers."""

    def __init__(
        self, registry: HandoverRegistry, access: Access = PRIVATE, copy: Callable[[], Descriptor] | None = None
    ) -> None:
        self.memory = Descriptor(os.memfd_create, "region", os.MFD_CLOEXEC)
        os.write(self.memory.fileno(), CONTENT)
        self.status = os.fstat(self.memory.fileno())
        self.number = next(registry.numbers)
        self.key = registry.offer(self.number, TOKEN, access, copy or self.copy)

    def copy(self) -> Descriptor:
        return Descriptor(os.open, f"/proc/self/fd/{self.memory.fileno()}", os.O_RDWR | os.O_CLOEXEC)

    def is_given(self, token: bytes = TOKEN) -> bool:
        given = ask(self.key, token)
        return given is not None and os.path.samestat(os.fstat(given.fileno()), self.status)


def connect(key: SealedKey) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(None)  # else connect(2) does not wait for its place in the queue
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(LONG_S), 0))
    try:
        connection.connect(key.socket_address)
    except BaseException:
        connection.close()
        raise
    return connection


def ask(key: SealedKey, token: bytes = TOKEN) -> Descriptor | None:
    """Return what is given to whom asks as a model does; None if it is refused. ConnectionError if it is broken off."""
    with connect(key) as connection:
        connection.send(encode_question(Question(key.number, token)))
        answer, numbers, _, _ = socket.recv_fds(connection, 4096, 16)
        if not answer:
            raise ConnectionResetError("the connection was broken off")
        assert decode_answer(answer) is bool(numbers)
        assert connection.recv(1) == b""
    given = [Descriptor(os.dup, number) for number in numbers]
    for number in numbers:
        os.close(number)
    assert len(given) < 2
    return given[0] if given else None


def reply_to(key: SealedKey, *messages: bytes) -> bytes | None:
    """Return what is answered to some messages; None if the connection is broken off."""
    with connect(key) as connection:
        try:
            for message in messages:
                connection.send(message)
            return connection.recv(4096)
        except ConnectionError:
            return None


def count_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def servers() -> int:
    return [thread.name for thread in threading.enumerate()].count("shm-handover")


def settles(condition: Callable[[], bool]) -> bool:
    """Return whether something is so within a long time."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@contextlib.contextmanager
def a_lingering_socket() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a TCP socket that is not closed before the other one is, and that one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with slow, other:
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(bytes(2**16))
        slow.setblocking(True)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        yield slow, other
