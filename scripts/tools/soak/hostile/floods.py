"""Floods of the handover by a user who is not allowed: he knows the names of all desks, which are no secret.

What he sends takes an hour to close: a TCP socket that lingers, full of bytes that nobody reads.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import threading
from pathlib import Path
from typing import Any, Final

from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.protocol.layout import TOKEN_LENGTH

from .attack import Attack
from .forged import MODEL

__all__ = ["HONEST", "CrowdedDesks", "LingeringDesk", "LingeringGuests"]

_LINGER: Final = struct.pack("ii", 1, 3600)
_MOST_LINGERING: Final = 400
_CROWD: Final = 200
_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group
HONEST: Final = f"{__package__}.honest"
"""The program whose processes are attacked."""

_KIND: Final = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
_DESKS: Final = re.compile(r" @(shmbu-fd-[0-9a-f]{32})$", re.MULTILINE)


class _Lingering(Attack):
    """Has sockets that take long to close, each of which can be given away once."""

    def prepare(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._kept: list[socket.socket] = []
        self._ready: list[socket.socket] = []

    def give(self, connection: socket.socket) -> None:
        """Send one to a peer, if he takes it; count whether he did."""
        lingering = self._ready.pop() if self._ready else self._make()
        try:
            socket.send_fds(connection, [b"y"], [lingering.fileno()])
        except OSError as error:
            self._ready.append(lingering)
            self.wire.answers[f"not taken: {error.strerror}"] += 1
            return
        self.wire.answers["taken"] += 1
        threading.Thread(target=lingering.close, daemon=True).start()  # which waits as long as the peer's would

    def _make(self) -> socket.socket:
        sender = socket.socket()
        sender.connect(self._listener.getsockname())
        receiver, _ = self._listener.accept()
        self._kept.append(receiver)  # reads nothing
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        return sender

    def close(self) -> None:
        super().close()
        while self._kept:
            self._kept.pop().close()  # resets the others


class LingeringDesk(_Lingering):
    """A desk of his own, to which his requests send the model: it hands over at once to who connects."""

    def prepare(self) -> None:
        super().prepare()
        self._key = SealedKey(secrets.token_hex(16), 1)
        self._desk = socket.socket(socket.AF_UNIX, _KIND)
        self._desk.bind(self._key.socket_address)
        self._desk.listen(4096)

    def strike(self) -> None:
        """Serve whoever has connected, and send the model here."""
        address = SlotAddress(MODEL, str(self._key), secrets.token_hex(TOKEN_LENGTH), 0)
        parameters: dict[str, Any] = {SLOT_PARAMETER: str(address), GENERATION_PARAMETER: 1}
        asking = threading.Thread(target=self.wire.send, args=(parameters,))
        asking.start()
        while asking.is_alive():
            with contextlib.suppress(BlockingIOError), self._desk.accept()[0] as model:
                if len(self._kept) < _MOST_LINGERING:
                    self.give(model)
            asking.join(0.0005)

    def close(self) -> None:
        super().close()
        self._desk.close()


class LingeringGuests(_Lingering):
    """Goes to every desk of every client, and leaves something there that takes long to close."""

    def strike(self) -> None:
        """Visit each desk once."""
        for desk in _desks():
            with socket.socket(socket.AF_UNIX, _KIND) as guest, contextlib.suppress(OSError):
                guest.connect(desk)
                if len(self._kept) < _MOST_LINGERING and _is_of_honest_client(guest):
                    self.give(guest)


class CrowdedDesks(Attack):
    """Fills the queue of one client's desk, over and over, beside which others of the same user have theirs."""

    def prepare(self) -> None:
        self._crowd: list[socket.socket] = []

    def strike(self) -> None:
        """Leave with the last crowd, and come with the next one."""
        self.pause()
        desks = _desks()
        if not desks:
            return
        desk = self.chance.choice(desks)
        with contextlib.suppress(OSError):  # the queue is full, or the desk has gone
            for _ in range(_CROWD):
                self._crowd.append(socket.socket(socket.AF_UNIX, _KIND))
                self._crowd[-1].connect(desk)
                if not _is_of_honest_client(self._crowd[0]):
                    break
        self.wire.answers["connected"] += len(self._crowd)

    def pause(self) -> None:
        while self._crowd:
            self._crowd.pop().close()


def _is_of_honest_client(guest: socket.socket) -> bool:
    """Return whether a desk belongs to a client of a soak: others on this machine are not to be disturbed."""
    pid, *_ = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return HONEST.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def _desks() -> list[str]:
    """Return the addresses of all desks, which every user may read."""
    return [f"\0{name}" for name in dict.fromkeys(_DESKS.findall(Path("/proc/net/unix").read_text()))]
