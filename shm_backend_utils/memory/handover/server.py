"""The handover server, from whose socket models fetch regions, and the registry of the regions of this process."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ...errors import MachineError
from ...process import call_after_fork
from ...protocol.handover import QUESTION_LENGTH, Question, SealedKey, decode_question, encode_answer
from ..descriptors import Access, Descriptor, translate_os_errors
from .peers import Closer, Peer, accept_descriptors

__all__ = ["REGISTRY", "HandoverRegistry", "HandoverServer", "Offer"]

_KIND: Final = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_SOCKET: Final = "the socket that models fetch regions from"
_BACKLOG: Final = 4096
_AT_ONCE: Final = 32  # connections accepted before the waiting ones are served again
_MOST_SILENT: Final = 64
_SILENCE_S: Final = 1.0
_PAUSE_S: Final = 0.01
_LOOK_S: Final = 10.0  # the thread looks at the offers this often, as an interrupted finalizer may not have woken it


class Offer(NamedTuple):
    """A region, or GPU memory, that every peer with its token and ``access`` may fetch; ``copy`` returns it anew."""

    token: bytes
    access: Access
    copy: Callable[[], Descriptor]


class HandoverServer:
    """A listening socket, and a thread that answers there and owns all descriptors, as no signal interrupts it.

    Other threads change ``offers`` at any time. The server ends for good when ``ends`` returns True, and also calls
    ``ends`` if it cannot open. It only peeks at messages: descriptors from a peer stay in the socket for the closer.
    """

    def __init__(self, offers: Mapping[int, Offer], closer: Closer, ends: Callable[[HandoverServer], bool]) -> None:
        self.name = secrets.token_hex(16)
        self._offers = offers
        self._closer = closer
        self._takes_no_descriptors = False  # whether the kernel refuses all descriptors from peers
        self._ends = ends
        self.error: BaseException | None = None  # why the server could not open, or ended too early
        self._is_open = threading.Event()  # also set if the server could not open
        self._waker: Descriptor | None = None
        self._listener: socket.socket | None = None
        self._connected: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, oldest first, with its time limit
        self._pause_until = 0.0
        call_after_fork(self)
        try:
            threading.Thread(target=self._run, name="shm-handover", daemon=True).start()
        except RuntimeError:
            raise MachineError(
                "handing regions over to models takes a thread, and this process can have no more; run fewer, or raise "
                "the limit (ulimit -u; docker: --pids-limit)"
            ) from None

    def wait_until_open(self) -> None:
        """Wait until models can connect. MachineError if this process cannot open a socket for that."""
        self._is_open.wait()
        if self.error is not None:
            raise self.error

    def wake(self) -> None:
        """Make the thread check whether anything is left to do. Takes no lock, so that finalizers may call it."""
        waker = self._waker  # this reference keeps the waker open, so that no other file gets its number
        if waker is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(waker.fileno(), 1)

    def after_fork(self) -> None:
        """Close the copies in a forked child. The parent's server goes on."""
        if self._waker is not None:
            self._waker.close()
        if self._listener is not None:
            self._listener.close()
        for connection, _ in self._connected.values():
            connection.close()

    def _run(self) -> None:
        try:
            self._open()
            self._is_open.set()
            while not self._ends(self):
                self._serve()
        except BaseException as error:
            self.error = error
            self._ends(self)
            if self._is_open.is_set():
                raise  # wait_until_open() raises an error that came earlier
        finally:
            self._close()
            self._is_open.set()

    @translate_os_errors(f"{_SOCKET} takes two file descriptors", f"{_SOCKET} cannot be opened: {{}}")
    def _open(self) -> None:
        self._waker = Descriptor(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, _KIND)
        self._takes_no_descriptors = accept_descriptors(self._listener, is_wanted=False)
        self._listener.bind(SealedKey(self.name, 1).socket_address)
        self._listener.listen(_BACKLOG)

    def _close(self) -> None:
        self._waker = None
        self._drop_all()
        if self._listener is not None:
            self._hang_up(self._listener)

    def _serve(self) -> None:
        """Wait for events and handle them: first those of open connections, then new connections."""
        assert self._waker is not None
        assert self._listener is not None
        now = time.monotonic()
        for number, (connection, until) in list(self._connected.items()):
            if until <= now:
                self._has_spoken(connection)  # the question may be here: on a busy machine, this thread may be late
                self._drop(number)
        if self._closer.is_full:
            self._pause_until = now + _PAUSE_S
        poll = select.poll()
        for number in (self._waker.fileno(), *self._connected):
            poll.register(number, select.POLLIN)
        if self._pause_until <= now:
            poll.register(self._listener, select.POLLIN)
        ready = {number for number, _ in poll.poll(self._patience_ms(now))}
        if self._waker.fileno() in ready:
            os.eventfd_read(self._waker.fileno())
        for number in ready & self._connected.keys():
            connection, _ = self._connected[number]
            if self._has_spoken(connection):
                self._drop(number)
        if self._listener.fileno() in ready:
            self._accept(self._listener)

    def _patience_ms(self, now: float) -> float:
        """Return the time until a silent peer must be dropped, a pause ends, or the thread must look at the offers."""
        ends = [until for _, until in self._connected.values()][:1]
        if self._pause_until > now:
            ends.append(self._pause_until)
        return (min(ends, default=now + _LOOK_S) - now) * 1e3 + 1

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # most likely, this process has no descriptors left
                self._pause_until = time.monotonic() + _PAUSE_S
                self._drop_all()
                return
            number = connection.fileno()
            self._connected[number] = connection, time.monotonic() + _SILENCE_S
            connection.setblocking(False)
            accesses = {offer.access for offer in list(self._offers.values())}  # now: the peer may ask for a new region
            if not any(map(Peer.of(connection).may_open, accesses)):
                self._hang_up(connection)
                del self._connected[number]
            elif self._has_spoken(connection):
                self._drop(number)
            elif len(self._connected) > _MOST_SILENT:
                self._drop(next(iter(self._connected)))

    def _has_spoken(self, connection: socket.socket) -> bool:
        """Answer a peer's question if it has come; return whether the connection can be closed."""
        try:
            message, _, flags, _ = connection.recvmsg(QUESTION_LENGTH + 1, 0, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError):  # the peer has gone, or has left no room for an answer
            if flags & socket.MSG_CTRUNC:  # the peer has sent descriptors
                _refuse(connection)
            else:
                connection.recv(1)  # if this side closed the socket with unread data, the peer would get an error
                self._answer(connection, decode_question(message))
        return True

    def _answer(self, connection: socket.socket, question: Question | None) -> None:
        copied = None if question is None else self._copy(question, Peer.of(connection))
        if copied is None:
            _refuse(connection)
            return
        with contextlib.closing(copied):
            socket.send_fds(connection, [encode_answer(is_given=True)], [copied.fileno()], socket.MSG_NOSIGNAL)

    def _copy(self, question: Question, peer: Peer) -> Descriptor | None:
        offer = self._offers.get(question.number)
        if offer is None or not hmac.compare_digest(offer.token, question.token) or not peer.may_open(offer.access):
            return None
        with contextlib.suppress(Exception):  # this process has no descriptors left, or is just closing the region
            copied = offer.copy()
            if self._offers.get(question.number) is offer:  # else the copy may be of another file with the same number
                return copied
        return None

    def _drop(self, number: int) -> None:
        self._hang_up(self._connected[number][0])
        del self._connected[number]  # last, so that after_fork() finds every open connection

    def _drop_all(self) -> None:
        for number in list(self._connected):
            self._drop(number)

    def _hang_up(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer has hung up before
            connected.shutdown(socket.SHUT_RDWR)  # also ends the copies of the socket, such as a forked child's
        if self._takes_no_descriptors:
            connected.close()
        else:
            self._closer.close(connected)


def _refuse(connection: socket.socket) -> None:
    connection.send(encode_answer(is_given=False), socket.MSG_NOSIGNAL)


class HandoverRegistry:
    """The regions that this process hands over, and the server for them. Methods that finalizers call take no lock."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)  # of regions; a forked child goes on counting from its parent's
        self._closer = Closer()
        self._begin()
        call_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._server: HandoverServer | None = None  # changed under the lock
        self._offers: dict[int, Offer] = {}

    def offer(self, number: int, token: bytes, access: Access, copy: Callable[[], Descriptor]) -> SealedKey:
        """Offer a region, or GPU memory, to models that know the token and have access, until it is withdrawn.

        The server's thread calls ``copy``, which opens a region anew: a peer that got the original open file
        description could release the region's locks. GPU memory has no locks, so a duplicate will do.
        """
        with self._lock:
            self._offers[number] = Offer(token, access, copy)
            server = self._server
            if server is None:
                server = self._server = HandoverServer(self._offers, self._closer, self._ends)
        server.wait_until_open()
        return SealedKey(server.name, number)

    def renew(self, number: int, token: bytes) -> None:
        """Replace the token of an offered region; KeyError if it was withdrawn."""
        self._offers[number] = self._offers[number]._replace(token=token)

    def withdraw(self, number: int) -> None:
        """Stop offering a region. Twice is fine. Takes no lock, so that finalizers may call it."""
        self._offers.pop(number, None)
        server = self._server
        if server is not None and not self._offers:
            server.wake()

    def after_fork(self) -> None:
        """Forget the parent's regions and server, in a forked child: that server's thread does not run here."""
        self._begin()

    def _ends(self, server: HandoverServer) -> bool:
        """Return whether a server must end, and then forget that server, so that the next offer starts a new one."""
        with self._lock:
            if self._server is server:
                if self._offers and server.error is None:
                    return False
                self._server = None
            return True


REGISTRY: Final = HandoverRegistry()
"""This process' only registry: one thread and one socket serve all regions of all pools."""
