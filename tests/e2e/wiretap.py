"""Listens to what a client and a server say to each other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Wiretap:
    """Passes bytes on between clients and a server."""

    def __init__(self, server_address: str) -> None:
        host, _, port = server_address.rpartition(":")
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self.connection_count = 0
        self._threads[0].start()

    def close(self) -> None:
        """Cut all connections, and take no more. Twice is fine."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._threads[0].join()
        for ended in self._sockets:
            with contextlib.suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for ended in (self._listener, *self._sockets):
            ended.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                self.connection_count += 1
                server = socket.create_connection(self._server)
                self._sockets.append(server)
                for source, target, record in ((client, server, self.sent), (server, client, None)):
                    thread = threading.Thread(target=_pass_on, args=(source, target, record))
                    self._threads.append(thread)
                    thread.start()


@contextlib.contextmanager
def tapped(server_address: str) -> Iterator[Wiretap]:
    wiretap = Wiretap(server_address)
    try:
        yield wiretap
    finally:
        wiretap.close()


def _pass_on(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if record is not None:
                record += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
