"""Servers of HTTP/2 for tests of our client: of the ``h2`` library, or byte by byte."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import h2.config
import h2.connection
import h2.events
import hpack

HEADERS: Final = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS: Final = [("grpc-status", "0"), ("grpc-message", "")]
PREFACE_BYTES: Final = 24
END_STREAM, END_HEADERS, PADDED = 1, 4, 8


class H2Peer:
    """The server's side of a connection, without I/O: it answers each call by ``answer``, once that has come whole."""

    def __init__(self, answer: Callable[[H2Peer, int, bytes], None]) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.headers: dict[int, dict[str, str]] = {}
        self._answer = answer
        self._messages: dict[int, bytes] = {}
        self._unsent: list[tuple[int, bytes, list[tuple[str, str]]]] = []

    def receive(self, data: bytes) -> bytes:
        """Take what the client has sent, and return what it is to be sent."""
        for event in self.connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.headers[event.stream_id] = {str(name): str(value) for name, value in event.headers}
                self._messages[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                self._messages[event.stream_id] += event.data
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self._answer(self, event.stream_id, self._messages.pop(event.stream_id))
        self.send_more()
        sent: bytes = self.connection.data_to_send()
        return sent

    def send(self, stream: int, data: bytes, trailers: list[tuple[str, str]] = TRAILERS, padding: int = 0) -> None:
        self.connection.send_headers(stream, HEADERS)
        if padding:
            self.connection.send_data(stream, data[:10], pad_length=padding)
            data = data[10:]
        self._unsent.append((stream, data, trailers))
        self.send_more()

    def send_more(self) -> None:
        waiting, self._unsent = self._unsent, []
        for stream, whole, trailers in waiting:
            data = whole
            while data and (size := min(self.connection.local_flow_control_window(stream), 16384, len(data))):
                self.connection.send_data(stream, data[:size])
                data = data[size:]
            if data:
                self._unsent.append((stream, data, trailers))
            else:
                self.connection.send_headers(stream, trailers, end_stream=True)


def message(content: bytes) -> bytes:
    return struct.pack(">BL", 0, len(content)) + content


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">L", len(payload))[1:] + struct.pack(">BBL", kind, flags, stream) + payload


def block(headers: list[tuple[str, str]]) -> bytes:
    """Return headers in HPACK, for a client that wants no table."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    encoded: bytes = encoder.encode(headers)
    return encoded


SETTINGS: Final = frame(4, 0, 0)


L = TypeVar("L", bound="Listener")


class Listener:
    """A server on a socket that does with each connection what the test says, in threads."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def accepted(self) -> int:
        return len(self._open)

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def hang_up(self) -> None:
        for each in self._open:
            with suppress(OSError):  # it is closed already
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._run, args=[connection]))
                self._threads[-1].start()

    def _run(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self._serve(connection)


def answering(answer: Callable[[H2Peer, int, bytes], None]) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        peer = H2Peer(answer)
        connection.sendall(peer.connection.data_to_send())
        while data := connection.recv(1 << 16):
            connection.sendall(peer.receive(data))

    return serve


def requests_of(connection: socket.socket) -> Callable[[], int]:
    received = connection.makefile("rb")
    received.read(PREFACE_BYTES)

    def next_request() -> int:
        while head := received.read(9):
            kind, flags, stream = struct.unpack(">BBL", head[3:])
            received.read(int.from_bytes(head[:3], "big"))
            if kind == 0 and flags & END_STREAM:
                return int(stream)
        raise OSError

    return next_request
