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

__all__ = ["Connections", "Exchange"]

_PIECE: Final = 1 << 18  # the most bytes to receive at once, or to join before sending
_MOST_NEWS: Final = 8  # the most pieces to read from an idle connection before giving it up
_LEAST_S: Final = 1e-3  # a timeout of 0 would make the socket non-blocking
_MOST_WAIT_MS: Final = 1e9  # poll takes no longer timeout
_NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connections:
    """The connections to one server for threads. A thread takes the idle one used last, or opens a new one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_closed = False
        self._idle: list[_Connection] = []  # a list's pop and append are atomic
        self.in_use: dict[_Connection, int] = {}  # the id of its exchange: a reference would form a cycle
        if server.tls is not None:
            server.tls.sslsocket_class = _TlsSocket
        call_after_fork(self)

    def call(self, request: Any, timeout_s: float) -> Any:
        """Return the answer to a request, as :meth:`.Transport.send`."""
        deadline = time.monotonic() + timeout_s
        exchange = Exchange(self, request)
        try:
            while True:  # Python 3.13 skips `finally` if an interrupt comes at the end of `while condition`
                if (answer := exchange.turn(deadline)) is not None:
                    return answer
        finally:
            exchange.end()

    def taken(self) -> _Connection:
        """Return an idle connection, or a new one."""
        try:
            while (connection := self._idle.pop()).has_news(0) and not connection.is_fit():
                connection.close()
        except IndexError:
            return _Connection(self.server)
        return connection

    def give_back(self, connection: _Connection) -> None:
        self.in_use.pop(connection, None)
        self._idle.append(connection)
        if self.is_closed:
            self.close()

    def drop(self, connection: _Connection, exchange: Exchange) -> None:
        if self.in_use.get(connection) == id(exchange):  # else an interrupt came as it was given back
            del self.in_use[connection]
            connection.close()

    def after_fork(self) -> None:
        """Close the parent's sockets in a forked child: they would keep the connections from ending.

        A call that the forking thread was making fails there as if the connection had broken.
        """
        for connection in [*self._idle, *self.in_use]:
            connection.close()
        self._idle.clear()

    def close(self) -> None:
        """Close the connections; hang up on those in use, whose threads close them. Twice is fine."""
        self.is_closed = True
        with contextlib.suppress(IndexError):  # pop raises it if the list is empty: other threads pop, too
            while True:
                self._idle.pop().close()
        for connection in list(self.in_use):
            connection.hang_up()


class Exchange:
    """A request, and its answer, over one connection; over another one if the request certainly has not begun."""

    __slots__ = ("_connection", "_connections", "_number", "_request", "_sendings")

    def __init__(self, connections: Connections, request: Any) -> None:
        self._connections = connections
        self._request = request
        self._connection: Any = None
        self._number = 0  # of the request on its connection
        self._sendings = 0

    def turn(self, deadline: float) -> Any:
        """Send and receive once, or return the answer that has come. Call :meth:`end` after the last turn."""
        connections, connection = self._connections, self._connection
        try:
            if connection is None:
                connection = self._connection = connections.taken()
                connections.in_use[connection] = id(self)
                if not (connection.is_open or connections.is_closed):
                    connection.open(deadline)
                if connections.is_closed:  # close() may have missed this connection, or its socket
                    raise ClosedError("this client")
                self._number = connection.conversation.begin(self._request, deadline - time.monotonic())
                self._sendings += 1
            ended = connection.conversation.ended
            if self._number not in ended:
                connection.take_turn(deadline)
                return None
        except TimeoutError:
            raise deadline_exceeded(connections.server.address) from None
        except OSError as error:
            if connections.is_closed:
                raise ClosedError("this client") from None
            raise connections.server.unreachable(error, is_connected=connection.is_open) from None
        outcome = ended.pop(self._number)
        self._number = 0
        if connection.conversation.has_room:
            connections.give_back(connection)
            self._connection = None
        self.end()
        if connections.is_closed:
            raise ClosedError("this client")
        if not isinstance(outcome, Unanswered):
            return outcome
        if outcome.may_have_begun or self._sendings == MOST_SENDINGS:
            raise connections.server.unanswered(outcome)
        return None

    def read(self, deadline: float) -> bool:
        """Send and receive once, if the answer has not come; return whether it had not."""
        is_under_way = self._number > 0 and self._number not in self._connection.conversation.ended
        if is_under_way:
            self._connection.take_turn(deadline)
        return is_under_way

    def end(self) -> None:
        """Drop the connection of an exchange without an answer: a late one must not be taken for another's."""
        if self._connection is not None:
            self._connections.drop(self._connection, self)
            self._connection, self._number = None, 0


class _Connection:
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
                return self.conversation.has_room
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
