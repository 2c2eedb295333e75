"""Sockets to one server for threads, kept open between requests. Each carries one request at a time."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from ...errors import ClosedError
from ...process import call_after_fork
from ..errors import deadline_exceeded
from .conversation import MOST_SENDINGS, Server, Unanswered, translate_handshake

__all__ = ["Connection", "Connections"]

_PIECE: Final = 1 << 18  # the most bytes to receive at once, or to join before sending
_MOST_NEWS: Final = 8  # the most pieces to read from an idle connection before giving it up
_LEAST_S: Final = 1e-3  # a timeout of 0 would make the socket non-blocking
_MOST_WAIT_MS: Final = 1e9  # poll takes no longer timeout
_NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connections:
    """The connections of one client for threads. A thread takes the idle one used last, or opens a new one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []  # a list's pop and append are atomic
        self._in_use: set[Connection] = set()
        self._is_closed = False
        if server.tls is not None:
            server.tls.sslsocket_class = _TlsSocket
        call_after_fork(self)

    def call(self, request: Any, timeout_s: float) -> Any:
        """Return the answer to a request, as :meth:`.Transport.send`; resend a request that certainly has not begun."""
        deadline = time.monotonic() + timeout_s
        outcome: Any = None
        for _ in range(MOST_SENDINGS):
            connection, number = self.begin(request, deadline)
            conversation, is_kept = connection.conversation, False
            try:
                while number not in conversation.ended:
                    connection.take_turn(deadline)
                outcome = conversation.ended.pop(number)
                is_kept = conversation.has_room and not conversation.failure
            except OSError as error:
                raise self.failure(error, connection) from None
            finally:
                self.end(connection, is_kept)
            if self._is_closed:
                raise ClosedError("this client")
            if not isinstance(outcome, Unanswered):
                return outcome
            if outcome.may_have_begun:
                break
        raise self.server.unanswered(outcome)

    def begin(self, request: Any, deadline: float) -> tuple[Connection, int]:
        """Begin a request; return its connection, for :meth:`end`, and its number there."""
        try:
            while (connection := self._idle.pop()).has_news(0) and not connection.is_fit():
                connection.close()
        except IndexError:
            connection = Connection(self.server)
        try:
            self._in_use.add(connection)
            if self._is_closed:  # an earlier close() did not see this connection
                raise ClosedError("this client")
            if not connection.is_open:
                connection.open(deadline)
                if self._is_closed:  # a close() while the socket connected may have missed the socket
                    raise ClosedError("this client")
            return connection, connection.conversation.begin(request, deadline - time.monotonic())
        except BaseException as error:
            self.end(connection, False)
            raise (self.failure(error, connection) if isinstance(error, OSError) else error) from None

    def end(self, connection: Connection, is_kept: bool) -> None:
        """Keep a connection for the next request, or close it: a late answer must not be taken for another's."""
        self._in_use.discard(connection)
        if is_kept:
            self._idle.append(connection)
        else:
            connection.close()
        if self._is_closed:
            self.close()

    def failure(self, error: OSError, connection: Connection) -> Exception:
        """Return the client's error for that of a socket in use."""
        if isinstance(error, TimeoutError):
            return deadline_exceeded(self.server.address)
        if self._is_closed:
            return ClosedError("this client")
        return self.server.unreachable(error, is_connected=connection.is_open)

    def after_fork(self) -> None:
        """Close the parent's sockets in a forked child: they would keep the connections from ending.

        A call that the forking thread was making fails there as if the connection had broken.
        """
        for connection in [*self._idle, *self._in_use]:
            connection.close()
        self._idle.clear()

    def close(self) -> None:
        """Close the connections; hang up on those in use, whose threads close them. Twice is fine."""
        self._is_closed = True
        with contextlib.suppress(IndexError):  # pop raises it if the list is empty: other threads pop, too
            while True:
                self._idle.pop().close()
        for connection in list(self._in_use):
            connection.hang_up()


class Connection:
    """One socket, which does not block, and the conversation over it."""

    def __init__(self, server: Server) -> None:
        poll = select.poll()
        self.conversation = server.conversation()
        self.is_open = False
        self.has_news: Callable[[float], Any] = poll.poll  # waits for up to the given milliseconds
        self._poll = poll.poll
        self._watch = poll.register
        self._server = server
        self._socket: Any = None

    def open(self, deadline: float) -> None:
        host, port, _, _, tls = self._server
        sock = self._socket = _connected(host, port, deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock.settimeout(max(deadline - time.monotonic(), _LEAST_S))
            with translate_handshake():
                sock = self._socket = tls.wrap_socket(sock, server_hostname=host)
            pending, poll = sock.pending, self._poll
            self.has_news = lambda wait_ms: pending() or poll(wait_ms)
        sock.setblocking(False)
        self._watch(sock, select.POLLIN)
        while not (self.conversation.is_ready or self.conversation.failure):
            self.take_turn(deadline)
        self._server.check_takes_requests(self.conversation)
        self.is_open = True

    def is_fit(self) -> bool:
        """Read the bytes that the server has sent since the last request; return whether another one may be sent."""
        for _ in range(_MOST_NEWS):
            try:
                self.conversation.receive(self._socket.recv(_PIECE))
            except _NOT_YET:  # the bytes were TLS's own
                pass
            except OSError:
                break
            if not self.has_news(0):
                return self.conversation.has_room and not self.conversation.failure
        return False

    def take_turn(self, deadline: float) -> None:
        """Send pending bytes, or some of them, and then receive."""
        conversation, out = self.conversation, self.conversation.out
        wait_ms = min((deadline - time.monotonic()) * 1e3, _MOST_WAIT_MS)
        if wait_ms <= 0:
            raise TimeoutError
        try:
            if out:
                if len(out) > 1 and sum(map(len, out)) <= _PIECE:
                    out[:] = (b"".join(out),)
                sent = self._socket.send(out[0])
                out[:1] = (memoryview(out[0])[sent:],) if sent < len(out[0]) else ()
            if not out and self.has_news(wait_ms):
                conversation.receive(self._socket.recv(_PIECE))
        except _NOT_YET:
            if out:
                self._watch(self._socket, select.POLLOUT)
                self._poll(wait_ms)
                self._watch(self._socket, select.POLLIN)

    def hang_up(self) -> None:
        """Shut the connection down, so that the thread that uses it ends its request and closes the socket."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the connection has already ended
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS' own would drop state in use

    def close(self) -> None:
        self.conversation.out.clear()  # else the list keeps a caller's arrays until garbage collection
        if self._socket is not None:
            self._socket.close()


class _Socket(socket.socket):
    """A socket that closes silently with its last reference: the client itself warns if it was not closed."""

    def __del__(self: Any) -> None:
        if self.fileno() >= 0:
            self.close()


class _TlsSocket(ssl.SSLSocket):
    __del__ = _Socket.__del__


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that answers."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sock: socket.socket | None = None
    while True:
        family, kind, protocol, _, address = addresses.pop(0)
        try:
            sock = _Socket(family, kind, protocol)  # fails if the machine lacks the address family
            sock.settimeout(max((deadline - time.monotonic()) / (len(addresses) + 1), _LEAST_S))
            sock.connect(address)
        except OSError:
            sock = None  # the last reference, which closes the socket
            if not addresses:
                raise
        else:
            return sock
