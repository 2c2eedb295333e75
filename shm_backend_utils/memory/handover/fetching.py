"""The model's side of the handover: it fetches a sealed region from a client that it does not trust.

So every wait here has a time limit. Closing a descriptor that is not a memfd may block, so another thread closes it.
From Linux 6.16 on, the socket accepts descriptors only after the check that the model allows the client's user.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Final, TypeVar

from ...errors import RegionGoneError, RegionRefusedError, translate
from ...protocol.handover import ANSWER_LENGTH, Question, SealedKey, decode_answer, encode_question
from ..descriptors import Descriptor, translate_os_errors
from ..shared_file import SealedFile, owner_refused
from .peers import Closer, Peer, accept_descriptors

__all__ = ["Fetcher"]

T = TypeVar("T")

_KIND: Final = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
_RETRY_S: Final = 0.002
_ROOM_FOR_ONE: Final = socket.CMSG_LEN(struct.calcsize("i"))
_HOW_TO_RECEIVE: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class Fetcher:
    """Fetches sealed regions for a session, and waits at most ``bound_s`` seconds for each. Threads may share it."""

    def __init__(self, bound_s: float, closer: Closer | None = None) -> None:
        self._bound_s = bound_s
        self._closer = Closer() if closer is None else closer

    def fetch(self, key: SealedKey, token: str, field: str, is_allowed: Callable[[int], bool]) -> SealedFile:
        """Fetch a region if ``is_allowed`` accepts its client's user id. The caller must check and close the file."""
        return self.take(key, token, field, is_allowed, lambda found: SealedFile.take(str(key), found, field))

    @translate_os_errors()
    def take(
        self,
        key: SealedKey,
        token: str,
        field: str,
        is_allowed: Callable[[int], bool],
        taken: Callable[[Descriptor], T],
    ) -> T:
        """Fetch a descriptor as :meth:`fetch` does, and return ``taken`` of it; then another thread closes it.

        The descriptor may be of any file, so ``taken`` must make no call that could block.
        """
        if self._closer.is_full:
            raise RegionRefusedError(
                field, f"the server is still closing {self._closer.waiting} earlier connections and files of clients"
            )
        deadline = time.monotonic() + self._bound_s
        connection = socket.socket(socket.AF_UNIX, _KIND)
        takes_no_descriptors = accept_descriptors(connection, is_wanted=False)
        try:
            _connect(connection, key, deadline, field)
            user = Peer.of(connection).user_id
            if not is_allowed(user):
                raise owner_refused(field, user)
            takes_no_descriptors = False
            accept_descriptors(connection, is_wanted=True)
            wait_s = max(0.0, deadline - time.monotonic())
            _ask(connection, Question(key.number, bytes.fromhex(token)), wait_s, field)
            return self._receive(connection, field, taken)
        finally:
            if takes_no_descriptors:
                connection.close()
            else:
                self._closer.close(connection)

    def _receive(self, connection: socket.socket, field: str, taken: Callable[[Descriptor], T]) -> T:
        """Peek at the answer and its descriptor: the socket keeps both, so the kernel closes no descriptor yet."""
        arguments = (ANSWER_LENGTH + 1,), (_ROOM_FOR_ONE,), (_HOW_TO_RECEIVE,)
        answers, again = itertools.tee(map(connection.recvmsg, *arguments))
        with _translate_hanging_up(field):
            received = Descriptor(next, _descriptors_in(answers))  # is closed if the answer brought none
        try:
            message, _, flags, _ = next(again)
            _check_answer(message, flags, received, field)
            return taken(received)
        finally:
            if received.fileno() >= 0:
                self._closer.close(received)


def _connect(connection: socket.socket, key: SealedKey, deadline: float, field: str) -> None:
    """Connect to the client; while its backlog is full, try again until the deadline."""
    while (number := connection.connect_ex(key.socket_address)) == errno.EAGAIN and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    if number in (errno.ECONNREFUSED, errno.ENOENT):
        raise RegionGoneError(
            f"{field} is not handed over on the server's machine; its owner is gone, or client and server do "
            'not share a network namespace (containers of one pod do; else take PoolOptions(region="system"))'
        )
    if number == errno.EAGAIN:
        raise RegionRefusedError(field, "its client accepts no connections, and its backlog is full")
    if number:
        raise RegionRefusedError(field, f"the server cannot reach its client: {os.strerror(number)}")


def _ask(connection: socket.socket, question: Question, wait_s: float, field: str) -> None:
    """Send the question, and wait until the answer, or the end of the connection, has come."""
    with _translate_hanging_up(field):
        connection.send(encode_question(question), socket.MSG_NOSIGNAL)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(wait_s * 1e3):
        raise RegionRefusedError(field, f"its client did not hand it over within {wait_s:.3g} s")


def _descriptors_in(answers: Iterable[tuple[Any, ...]]) -> Iterator[int]:
    """Return the descriptors in messages of recvmsg; all of this runs in C, where no signal handler interrupts it."""
    ancillary = itertools.chain.from_iterable(map(itemgetter(1), answers))
    return map(int.from_bytes, map(itemgetter(2), ancillary), itertools.repeat(sys.byteorder))


def _check_answer(message: bytes, flags: int, received: Descriptor, field: str) -> None:
    """Raise an error unless the answer is valid and came with exactly one descriptor."""
    has_one = received.fileno() >= 0
    if flags & socket.MSG_CTRUNC:
        if has_one:
            raise RegionRefusedError(field, "its client has handed over more than one descriptor")
        Descriptor(os.eventfd, 0).close()  # raises if the cause is that this process has no descriptors left
        raise RegionRefusedError(field, "a security policy keeps its client's descriptor from the server")
    if not message:
        raise _hung_up(field)
    is_given = decode_answer(message)
    if is_given is None:
        raise RegionRefusedError(field, "its client's answer is not one of this version of the protocol")
    if is_given != has_one:
        raise RegionRefusedError(field, "its client's answer contradicts the descriptors that came with it")
    if not is_given:
        raise RegionGoneError(f"{field} is no longer handed over; its owner closed it or changed its token")


def _translate_hanging_up(field: str) -> translate[OSError]:
    def meaning(error: OSError) -> RegionGoneError | RegionRefusedError:
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return _hung_up(field)
        return RegionRefusedError(field, f"its client cannot be asked: {os.strerror(error.errno or 0)}")

    return translate(OSError, meaning)


def _hung_up(field: str) -> RegionGoneError:
    """Return the error for a client that closed the connection before it answered: sending or receiving finds that."""
    return RegionGoneError(
        f"{field} is no longer handed over: its client closed the connection; it has closed its regions, or has none "
        "that the server's user may open (PoolOptions(access=...))"
    )
