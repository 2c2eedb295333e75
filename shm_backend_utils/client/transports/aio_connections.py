"""Connections to one server for tasks of one event loop, kept open from request to request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any, Final

from ...errors import ClosedError
from ..errors import deadline_exceeded
from .conversation import MOST_SENDINGS, Conversation, Server, Unanswered, translate_handshake

__all__ = ["AsyncConnections"]

_MOST_UNSENT: Final = 1 << 26  # bytes; more only if the server does not read what its windows allow
_NEXT_ADDRESS_S: Final = 1.0  # how long to wait for one address before the host's next one
_GONE_MS: Final = 20_000
"""How long a peer may leave data unacknowledged. By default TCP waits a quarter of an hour, and all calls with it."""


class AsyncConnections:
    """The connections of one client for tasks of one event loop. Requests share a connection if they can."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._open: set[_Connection] = set()
        self._with_room: list[_Connection] = []  # or had room when they were added
        self._connecting: set[asyncio.Task[_Connection]] = set()
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def call(self, request: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        outcome: Any = None
        for _ in range(MOST_SENDINGS):
            if self._is_closed:
                raise ClosedError("this client")
            connection = self._listed() or await self._connected(deadline)
            while connection.is_full():  # other tasks' requests took its room first
                connection = self._listed() or await self._connected(deadline)
            try:
                outcome = await connection.call(request, deadline - time.monotonic())
            except TimeoutError:
                raise deadline_exceeded(self._server.address) from None
            finally:
                if not connection.is_listed and connection.is_fit():
                    self._list(connection)
            if not isinstance(outcome, Unanswered):
                return outcome
            if self._is_closed:
                raise ClosedError("this client")
            if outcome.may_have_begun:
                break
        raise self._server.unanswered(outcome)

    async def close(self) -> None:
        """End the connections and their pending requests. Twice is fine."""
        self._is_closed = True
        for each in list(self._connecting):
            each.cancel()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # lets the loop close the sockets

    def _list(self, connection: _Connection) -> None:
        self._with_room.append(connection)
        connection.is_listed = True

    def _listed(self) -> _Connection | None:
        while self._with_room:
            connection = self._with_room[-1]
            if connection.is_fit():
                return connection
            self._with_room.pop().is_listed = False
        return None

    async def _connected(self, deadline: float) -> _Connection:
        connecting = asyncio.ensure_future(self._connect())
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        try:  # not wait_for, which may swallow a cancellation before Python 3.12
            done, _ = await asyncio.wait((connecting,), timeout=deadline - time.monotonic())
        finally:
            connecting.cancel()  # does nothing if the connection is made
        if not done:
            raise deadline_exceeded(self._server.address)
        try:
            return connecting.result()
        except asyncio.CancelledError:
            raise (ClosedError("this client") if self._is_closed else asyncio.CancelledError) from None
        except OSError as error:
            raise self._server.unreachable(error, is_connected=False) from None

    async def _connect(self) -> _Connection:
        """Connect, and wait until requests may begin; only one of many tasks that need a shared connection does so."""
        if not self._server.conversation.is_shared:
            return await self._opened()
        async with self._lock:
            return self._listed() or await self._opened()

    async def _opened(self) -> _Connection:
        host, port, _, conversation, tls = self._server
        loop = asyncio.get_running_loop()
        sock = await _socket_to(host, port)
        with translate_handshake() if tls else contextlib.nullcontext():
            _, connection = await loop.create_connection(
                lambda: _Connection(conversation(), self._open),
                sock=sock,
                ssl=tls,
                server_hostname=host if tls else None,
            )
        try:
            await connection.ready
        except BaseException:
            connection.close()
            raise
        self._server.check_takes_requests(connection.conversation)
        self._list(connection)
        return connection


async def _socket_to(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    while True:
        family, kind, protocol, _, address = addresses.pop(0)
        try:
            with contextlib.ExitStack() as failed:
                sock = failed.enter_context(socket.socket(family, kind, protocol))
                sock.setblocking(False)
                await asyncio.wait_for(loop.sock_connect(sock, address), _NEXT_ADDRESS_S if addresses else None)
                failed.pop_all()
                return sock
        except (OSError, asyncio.TimeoutError):
            if not addresses:
                raise


class _Connection(asyncio.Protocol):
    """One connection, and the requests that are under way on it."""

    is_listed = False

    def __init__(self, conversation: Conversation, among: set[_Connection]) -> None:
        self.conversation = conversation
        self.ready = asyncio.get_running_loop().create_future()
        self._open = among
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
        self._open.add(self)
        self._settle()

    def data_received(self, data: bytes) -> None:
        self.conversation.receive(data)
        self._settle()

    def _settle(self) -> None:
        """Send pending bytes, hand over ended requests, and hang up if the connection is of no more use."""
        conversation = self.conversation
        if conversation.out:
            if not self._transport.is_closing():
                self._transport.writelines(conversation.out)
            conversation.out.clear()
        for number in list(conversation.ended):
            answer = self._waiting.pop(number, None)
            outcome = conversation.ended.pop(number)
            if answer is not None and not answer.done():
                answer.set_result(outcome)
        if not self.ready.done() and (conversation.is_ready or conversation.failure):
            self.ready.set_result(None)
        is_of_use = conversation.has_room or self._waiting
        is_flooded = conversation.is_shared and self._transport.get_write_buffer_size() > _MOST_UNSENT
        if conversation.failure or not is_of_use or is_flooded:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        self.conversation.receive(b"")
        self._settle()

    def is_fit(self) -> bool:
        conversation = self.conversation
        return conversation.has_room and not self._transport.is_closing()

    def is_full(self) -> bool:
        """Return whether requests that are under way leave no room for another."""
        return bool(self._waiting) and not self.is_fit()

    async def call(self, request: Any, timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise TimeoutError
        if not self.is_fit():  # it may have failed since the caller chose it
            return Unanswered(self.conversation.failure or "Socket closed", may_have_begun=False)
        loop = asyncio.get_running_loop()
        outcome = loop.create_future()
        late = loop.call_later(timeout_s, _tell_late, outcome)
        is_to_settle = bool(self.conversation.out)  # another request has scheduled it
        number = self.conversation.begin(request, timeout_s)
        self._waiting[number] = outcome
        if len(self._waiting) == 1:
            self._settle()
        elif not is_to_settle:  # soon, so that other tasks' requests go with this one
            loop.call_soon(self._settle)
        try:
            return await outcome
        finally:
            late.cancel()
            if self._waiting.pop(number, None) is not None:  # its caller no longer waits
                self.conversation.cancel(number)
                self._settle()

    def close(self) -> None:
        """End the connection; its pending requests raise ClosedError."""
        for outcome in self._waiting.values():
            if not outcome.done():
                outcome.set_exception(ClosedError("this client"))
        self._waiting.clear()
        self._transport.abort()


def _tell_late(outcome: asyncio.Future[Any]) -> None:
    if not outcome.done():
        outcome.set_exception(TimeoutError())
