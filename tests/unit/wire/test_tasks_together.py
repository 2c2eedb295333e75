"""Requests of tasks that run in one turn of the loop: sent together, answered each for itself, and cancelled alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from h2.exceptions import StreamClosedError

from shm_backend_utils.client.transports.aio_connections import AsyncConnections
from shm_backend_utils.client.transports.conversation import Server
from shm_backend_utils.client.transports.grpc.http2 import Http2, Request
from shm_backend_utils.client.transports.grpc.transport import head_of
from tests.unit.wire.peers import H2Peer

HEAD: Final = head_of("ModelInfer", "localhost")
LONG_S: Final = 30.0
TASKS: Final = 64


class Peer(asyncio.Protocol):
    """A server that gives each message back."""

    def __init__(self, served: list[Peer]) -> None:
        served.append(self)
        self.messages: list[bytes] = []
        self.peer = H2Peer(self._answer)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.peer.receive(data))

    def _answer(self, peer: H2Peer, stream: int, data: bytes) -> None:
        self.messages.append(data[5:])
        with suppress(StreamClosedError):  # the client has cancelled it
            peer.send(stream, data)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[AsyncConnections, Peer]]:
    served: list[Peer] = []
    server = await asyncio.get_running_loop().create_server(lambda: Peer(served), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connections = AsyncConnections(Server("127.0.0.1", port, "grpc://localhost", Http2))
    assert await exchanged(connections, b"first") == b"first"
    yield connections, served[0]
    await connections.close()
    server.close()
    await server.wait_closed()


async def exchanged(connections: AsyncConnections, message: bytes) -> bytes:
    reply = await connections.call(Request(HEAD, message), LONG_S)
    assert reply.status == 0
    return bytes(reply.message)


def test_they_are_sent_together() -> None:
    async def main() -> None:
        async with connected() as (connections, peer):
            transport = next(iter(connections._open))._transport
            write, written = transport.writelines, []

            def counted(pieces: list[bytes]) -> None:
                written.append(len(pieces))
                write(pieces)

            transport.writelines = counted
            messages = [b"%d" % number for number in range(TASKS)]
            assert await asyncio.gather(*[exchanged(connections, each) for each in messages]) == messages
            assert written == [1, TASKS - 1]  # the first finds nothing under way
            assert sorted(peer.messages) == sorted([b"first", *messages])

    asyncio.run(main())


def test_one_that_is_cancelled_before_it_is_sent_costs_the_others_nothing() -> None:
    async def main() -> None:
        async with connected() as (connections, peer):
            tasks = [asyncio.ensure_future(exchanged(connections, b"%d" % number)) for number in range(TASKS)]
            asyncio.get_running_loop().call_soon(tasks[TASKS // 2].cancel)  # before their requests are sent
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled = [number for number, each in enumerate(outcomes) if isinstance(each, asyncio.CancelledError)]
            assert cancelled == [TASKS // 2]
            assert [each for each in outcomes if isinstance(each, bytes)] == [
                b"%d" % number for number in range(TASKS) if number != TASKS // 2
            ]
            assert await exchanged(connections, b"last") == b"last"
            assert peer.messages.count(b"last") == 1

    asyncio.run(main())


def test_a_connection_that_is_lost_meanwhile_fails_them_all() -> None:
    async def main() -> None:
        async with connected() as (connections, peer):
            tasks = [asyncio.ensure_future(exchanged(connections, b"%d" % number)) for number in range(TASKS)]
            asyncio.get_running_loop().call_soon(peer._transport.abort)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, Exception | bytes) for each in outcomes)
            assert any(isinstance(each, Exception) for each in outcomes)
            sent = [each for each in peer.messages if each != b"first"]
            assert len(sent) == len({*sent})  # none twice

    asyncio.run(main())
