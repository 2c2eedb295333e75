"""Connections to one server over HTTP, kept open from call to call, for any number of threads."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Final

from ....errors import ClosedError
from ....http.reply_in_time import ReplyInTime
from ...errors import deadline_exceeded, unavailable
from .codec import Answer

__all__ = ["TLS_HANDSHAKE", "TLS_HANDSHAKE_BREAKS", "HttpConnections"]

TLS_HANDSHAKE: Final = "TLS handshake: "
# How a server without TLS ends a handshake; which, is chance.
TLS_HANDSHAKE_BREAKS: Final = (ssl.SSLError, ConnectionResetError, HTTPException)
_PIECE: Final = 1 << 22  # bytes of an answer that room is made for, before they are there


class HttpConnections:
    """The connections of one client. A thread takes the one that was used last, or opens another.

    ``address`` has a path behind ``HOST:PORT`` where Triton is not at the server's root; messages show the other one.
    """

    def __init__(self, address: str, shown_address: str, tls: ssl.SSLContext | None) -> None:
        self._server, _, base = address.partition("/")
        self._base = f"/{base}" if base else ""
        self._shown_address = shown_address
        self._tls = tls
        self._idle: list[HTTPConnection] = []
        self._in_use: set[socket.socket] = set()
        self._is_closed = False

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        most_bytes: int | None = None,
        *,
        timeout_s: float,
    ) -> Answer:
        """Send one request, as :class:`.codec.HttpMessage` has it, and return the answer, whatever it says.

        ServerUnavailableError also if the answer is longer than ``most_bytes``; ClosedError if the client was closed,
        before or meanwhile.
        """
        self._check_is_open()
        deadline = time.monotonic() + timeout_s
        connection = self._take()
        doing = ""
        sock: socket.socket | None = None
        try:
            if connection.sock is None:
                doing = TLS_HANDSHAKE if self._tls is not None else ""
                connection.timeout = timeout_s
                connection.connect()
                doing = ""
            sock = connection.sock  # a connection lets go of it before the last answer is read
            self._in_use.add(sock)
            self._check_is_open()  # whoever closed before this was in use has not hung up on it
            _wait_at_most_until(deadline, connection)
            connection.response_class = functools.partial(ReplyInTime, deadline=deadline)  # type: ignore[assignment]
            connection.request(method, f"{self._base}{path}", body, {**headers})
            response = connection.getresponse()
            answer = Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                _read(response, most_bytes),
            )
            self._check_is_open()  # without a length, an answer seems to be whole when somebody hangs up
        except TimeoutError:
            connection.close()  # the late answer must not be taken for the next one's
            raise deadline_exceeded() from None
        except (OSError, HTTPException) as error:  # no server, one that died, or one that does not speak HTTP
            connection.close()
            self._check_is_open()
            reason = getattr(error, "strerror", None) or str(error)
            if not isinstance(error, TLS_HANDSHAKE_BREAKS):
                doing = ""
            raise unavailable(self._shown_address, f"{doing}{type(error).__name__}: {reason}") from None
        except BaseException:  # a key was pressed: nobody knows how far request and answer came
            connection.close()
            raise
        finally:
            if sock is not None:
                self._in_use.discard(sock)
        self._give_back(connection)
        return answer

    def close(self) -> None:
        """Close the connections; hang up on those in use, whose threads close them. May be called again."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()
        for sock in list(self._in_use):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of TLS takes its state away from the other thread

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this client") from None

    def _take(self) -> HTTPConnection:
        while True:
            try:
                connection = self._idle.pop()  # a list's pop and append are atomic
            except IndexError:
                break
            if _is_open(connection):
                return connection
            connection.close()
        if self._tls is None:
            return HTTPConnection(self._server)
        return HTTPSConnection(self._server, context=self._tls)

    def _give_back(self, connection: HTTPConnection) -> None:
        self._idle.append(connection)
        if self._is_closed:
            self.close()


def _is_open(connection: HTTPConnection) -> bool:
    """Return whether the server has neither closed the connection nor sent what nobody asked for."""
    if connection.sock is None:  # it said "Connection: close"
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _wait_at_most_until(deadline: float, connection: HTTPConnection) -> None:
    sock: socket.socket | None = connection.sock
    if sock is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)


def _read(response: HTTPResponse, most_bytes: int | None) -> bytes:
    if most_bytes is not None and (response.length or 0) > most_bytes:
        raise _too_long(most_bytes)
    if response.length is not None and response.length <= _PIECE:
        return response.read()
    pieces = []
    received = 0
    while piece := response.read1(_PIECE):
        pieces.append(piece)
        received += len(piece)
        if most_bytes is not None and received > most_bytes:
            raise _too_long(most_bytes)
    if response.length:  # read1 takes what there is for all
        raise IncompleteRead(b"", response.length)
    response.close()  # which read1 forgets before Python 3.11.8, and then the connection takes no other request
    return b"".join(pieces)


def _too_long(most_bytes: int) -> HTTPException:
    return HTTPException(f"an answer of more than {most_bytes} bytes")
